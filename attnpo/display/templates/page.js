"use strict";
// Tables are sorted by a press on a head: up, down, as they were. Numbers go by their first number, empty cells last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], rows = body ? [...body.rows] : [], heads = [...table.querySelectorAll("thead th")];
  if (rows.length < 2) continue;
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const text = row => row.cells[place].textContent.trim();
    const number = row => parseFloat(text(row).replace(/^[^-+\d.]+/, ""));
    const filled = rows.filter(row => text(row) !== "" && text(row) !== "-");
    const numeric = filled.length > 0 && filled.every(row => /^[[(]?[-+]?\.?\d/.test(text(row)));
    button.addEventListener("click", () => {
      const was = head.getAttribute("aria-sort");
      const now = was === "ascending" ? "descending" : was === "descending" ? null : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      if (now) head.setAttribute("aria-sort", now);
      const sign = now === "descending" ? -1 : 1;
      const compared = (one, two) => numeric ? number(one) - number(two)
        : text(one).localeCompare(text(two), undefined, { numeric: true });
      const empty = rows.filter(row => !filled.includes(row));
      const sorted = now ? [...[...filled].sort((one, two) => sign * compared(one, two)), ...empty] : rows;
      body.append(...sorted);
    });
  });
}
