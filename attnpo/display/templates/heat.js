"use strict";
// A pair is switched from the weights it is trained with to those of a layer and round, on the source's own tokens.
for (const row of document.querySelectorAll("[data-rounds]")) {
  const rounds = JSON.parse(row.querySelector("script[type='application/json']").textContent);
  const sides = ["chosen", "rejected"].map(name => [name, row.querySelector(`.heat-side.${name} .heat-tokens`)]);
  const trained = sides.map(([, place]) => [...place.childNodes]);
  const bar = document.createElement("div");
  bar.className = "heat-switch";
  const choice = (words, options) => {
    const label = document.createElement("label"), select = document.createElement("select");
    for (const [value, text] of options) select.add(new Option(text, value));
    label.append(words + " ", select);
    bar.append(label);
    return select;
  };
  const layer = choice("layer", [["", "as trained"], ...rounds[0].layers.map((name, place) => [place, name])]);
  const round = choice("round", rounds.map((one, place) => [place, one.name]));
  const show = () => {
    round.disabled = layer.value === "";
    sides.forEach(([name, place], number) => {
      if (layer.value === "") return place.replaceChildren(...trained[number]);
      const side = rounds[round.value][name], weights = side.rows[layer.value];
      place.replaceChildren(...side.tokens.map(([text, id, start, end], at) => {
        const span = document.createElement("span"), share = Math.log2(Math.max(weights[at], 1e-9)) / {{ octaves }};
        span.className = "h" + ({{ levels }} + Math.max(-{{ levels }}, Math.min({{ levels }}, Math.round(share * {{ levels }}))));
        span.textContent = text;
        span.title = `${weights[at].toFixed(2)}, id ${id}, characters ${start} to ${end}, as the source read it`;
        return span;
      }));
    });
  };
  layer.addEventListener("change", show);
  round.addEventListener("change", show);
  row.querySelector(".heat-head").after(bar);
  show();
}
