"use strict";
// The explorer: unpacks what it shows from this file, draws one pair and the rows of the list that are seen.
const explorer = (() => {
  const byId = name => document.getElementById(name);
  const ROW = 54, UNKNOWN = 255, SIGNED_TOP = 127;
  const unpacked = new Map();
  let data, first, ids, characters, order = [], shown = 0;

  // The script stands behind what the first pair is drawn from; what stands behind the script is waited for.
  const here = new Set(Array.from(document.querySelectorAll("[id^=data-]"), one => one.id));
  const whole = new Promise(done => document.addEventListener("DOMContentLoaded", done, {once: true}));

  async function bytes(name) {
    if (!here.has("data-" + name)) await whole;
    const letters = atob(byId("data-" + name).textContent), packed = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  // ---------------------------------------------------------------- numbers

  // The table of a view's codes; the same as Scale.decode in attnpo/display/explorer.py.
  function decoded(view) {
    const table = new Float64Array(256);
    for (let code = 1; code < UNKNOWN; code++) {
      const negative = view.signed && code > SIGNED_TOP;
      const size = 2 ** (view.low + (code - 1 - (negative ? SIGNED_TOP : 0)) * view.step);
      table[code] = negative ? -size : size;
    }
    table[UNKNOWN] = NaN;
    return table;
  }

  async function weights(number) {
    if (!unpacked.has(number)) {
      const view = data.views[number], codes = new Uint8Array(await bytes("weights-" + number)), table = decoded(view);
      unpacked.set(number, {view, codes, table, ...statistics(view, codes, table)});
    }
    return unpacked.get(number);
  }

  const range = (pair, side) => [first[2 * pair + side], first[2 * pair + side + 1]];

  // Means over both responses: entropy as a share of that of uniform weights, exp(entropy) as effective number.
  function statistics(view, codes, table) {
    const entropy = [], effective = [], coverage = [];
    data.pairs.forEach((_, pair) => {
      const shares = [], numbers = [];
      for (const side of [0, 1]) {
        const [begin, end] = range(pair, side);
        let total = 0, sum = 0;
        for (let i = begin; i < end; i++) total += Math.abs(table[codes[i]]);
        for (let i = begin; i < end; i++) {
          const share = Math.abs(table[codes[i]]) / total;
          if (share > 0) sum -= share * Math.log(share);
        }
        const known = total > 0;
        shares.push(known ? (end - begin > 1 ? sum / Math.log(end - begin) : 1) : NaN);
        numbers.push(known ? Math.exp(sum) : NaN);
      }
      entropy.push((shares[0] + shares[1]) / 2);
      effective.push(numbers);
      const found = view.coverage[pair];
      coverage.push(found && found[0] !== null && found[1] !== null ? (found[0] + found[1]) / 2 : NaN);
    });
    return {entropy, effective, coverage};
  }

  // Half the sum of the differences of both views' shares (0: alike, 1: on other tokens), mean over both responses.
  function disagreement(one, other) {
    return data.pairs.map((_, pair) => {
      let sum = 0;
      for (const side of [0, 1]) {
        const [begin, end] = range(pair, side);
        let mine = 0, theirs = 0, apart = 0;
        for (let i = begin; i < end; i++) {
          mine += Math.abs(one.table[one.codes[i]]);
          theirs += Math.abs(other.table[other.codes[i]]);
        }
        for (let i = begin; i < end; i++)
          apart += Math.abs(one.table[one.codes[i]] / mine - other.table[other.codes[i]] / theirs);
        sum += apart / 4;
      }
      return sum;
    });
  }

  const level = relative => {
    const size = Math.abs(relative);
    if (Number.isNaN(size)) return 0;
    if (size === 0) return -data.levels;
    return Math.round(data.levels * Math.max(-1, Math.min(1, Math.log2(size) / data.octaves)));
  };
  const shade = relative => (relative < 0 ? "v" : "h") + (level(relative) + data.levels);

  // ---------------------------------------------------------------- texts

  const hex = code => "[U+" + code.toString(16).toUpperCase().padStart(4, "0") + "]";
  const MARKS = {"\n": "\u21b5\n", "\t": "\u21e5\t", "\r": "\u240d"};
  const acts = /[\p{Zl}\p{Zp}\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]/u;
  // The same as make_visible() and make_readable() in attnpo/display/heat.py.
  function named(char) {
    if (char in MARKS) return MARKS[char];
    const code = char.codePointAt(0);
    if (/\p{Cc}/u.test(char)) return code < 32 ? String.fromCodePoint(0x2400 + code) : hex(code);
    if (code >= 0xd800 && code <= 0xdfff) return "\ufffd";
    return acts.test(char) ? hex(code) : char;
  }
  const visible = text => /^ +$/.test(text) ? "\u2423".repeat(text.length) : Array.from(text, named).join("");
  const readable = text => text.split("\n").map(line => Array.from(line, named).join("")).join("\n");

  function element(tag, words, className) {
    const made = document.createElement(tag);
    if (words !== undefined) made.textContent = words;
    if (className) made.className = className;
    return made;
  }

  const fixed = (value, digits = 3) => Number.isFinite(value) ? value.toFixed(digits) : "\u2013";
  const figures = value => Number.isFinite(value) ? Number(value.toPrecision(3)).toString() : "\u2013";
  const percent = value => Number.isFinite(value) ? (100 * value).toFixed(1) + " %" : "\u2013";

  // ---------------------------------------------------------------- what is chosen

  const named_view = view => [view.source, view.layer, view.round].filter(Boolean).join(", ");
  const numberOf = (source, layer, round) =>
    data.views.findIndex(view => view.source === source && view.layer === layer && view.round === round);

  function fill(select, values, keep) {
    const before = keep === undefined ? select.value : keep;
    select.replaceChildren(...values.map(one => {
      const option = element("option", one || "\u2013");
      option.value = one;
      return option;
    }));
    if (values.includes(before)) select.value = before;
    select.disabled = values.length < 2;
  }

  const distinct = values => [...new Set(values)];
  const chosen = () => numberOf(byId("source").value, byId("layer").value, byId("round").value);

  function offer() {
    const source = byId("source").value;
    const mine = data.views.filter(view => view.source === source);
    fill(byId("layer"), distinct(mine.map(view => view.layer)));
    fill(byId("round"), distinct(mine.filter(view => view.layer === byId("layer").value).map(view => view.round)));
    const now = chosen(), others = data.views.map((_, number) => number).filter(number => number !== now);
    const select = byId("other"), before = Number(select.value);
    select.replaceChildren(...others.map(number => {
      const option = element("option", named_view(data.views[number]));
      option.value = number;
      return option;
    }));
    select.disabled = !others.length;
    byId("sort").querySelector("[value=disagreement]").disabled = !others.length;
    if (!others.length) return;
    // Kept where the reader chose it; else the other source with the same place among its layers and the same round.
    if (select.dataset.chosen && others.includes(before)) select.value = before;
    else select.value = opposite(now, others);
  }

  function opposite(now, others) {
    const mine = data.views[now];
    const layers = source => distinct(data.views.filter(one => one.source === source).map(one => one.layer));
    const place = layers(mine.source).indexOf(mine.layer);
    const score = number => {
      const view = data.views[number], theirs = layers(view.source);
      return 4 * (view.source !== mine.source) + 2 * (theirs.indexOf(view.layer) === Math.min(place, theirs.length - 1))
        + (view.round === mine.round);
    };
    return others.reduce((best, one) => score(one) > score(best) ? one : best);
  }

  let current, against, apart, lowered;

  async function choose() {
    const select = byId("other"), wanted = [chosen(), select.value];
    const mine = await weights(wanted[0]);
    const theirs = select.value === "" ? null : await weights(Number(select.value));
    if (chosen() !== wanted[0] || select.value !== wanted[1]) return;  // switched again meanwhile
    current = mine;
    against = theirs;
    apart = against ? disagreement(current, against) : data.pairs.map(() => NaN);
    arrange();
  }

  function arrange() {
    const kept = order[shown], words = byId("search").value.toLowerCase();
    if (words) lowered ||= data.pairs.map(pair =>
      [pair.id, ...pair.prompt.map(turn => turn[1]), ...pair.texts].join("\n").toLowerCase());
    order = data.pairs.map((_, pair) => pair).filter(pair => !words || lowered[pair].includes(words));
    const by = {coverage: current.coverage, entropy: current.entropy, disagreement: apart}[byId("sort").value];
    const sign = Number(byId("direction").value);
    if (by) order.sort((a, b) => {
      const lacking = Number.isNaN(by[a]) - Number.isNaN(by[b]);
      return lacking || sign * (by[a] - by[b]) || a - b;
    });
    else if (sign < 0) order.reverse();
    shown = Math.max(0, order.indexOf(kept));
    byId("spacer").style.height = order.length * ROW + "px";
    see();
    draw();
  }

  // ---------------------------------------------------------------- the list

  function rows() {
    const list = byId("list"), from = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const until = Math.min(order.length, from + Math.ceil(list.clientHeight / ROW) + 8);
    const made = [];
    for (let place = from; place < until; place++) {
      const pair = order[place], row = element("div", undefined, "row");
      row.id = "row-" + pair;
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(place === shown));
      row.setAttribute("aria-posinset", String(place + 1));
      row.setAttribute("aria-setsize", String(order.length));
      row.style.top = place * ROW + "px";
      row.dataset.place = place;
      const turn = data.pairs[pair].prompt.at(-1);
      const head = element("b", readable(turn ? turn[1].slice(0, 120).replace(/\s+/g, " ") : data.pairs[pair].id));
      head.dir = "auto";
      row.append(head, element("small", "cov " + percent(current.coverage[pair]) + " \u00b7 ent "
        + fixed(current.entropy[pair], 2) + " \u00b7 dis " + fixed(apart[pair], 2)));
      made.push(row);
    }
    byId("spacer").replaceChildren(...made);
    if (!order.length) byId("spacer").replaceChildren(element("p", "no pair has these words", "none"));
    if (order.length) list.setAttribute("aria-activedescendant", "row-" + order[shown]);
    else list.removeAttribute("aria-activedescendant");
  }

  function see() {
    const list = byId("list"), top = shown * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    rows();
  }

  function go(place) {
    if (!order.length) return;
    shown = Math.max(0, Math.min(order.length - 1, place));
    see();
    draw();
    byId("pair").scrollTop = 0;
  }

  // ---------------------------------------------------------------- a pair

  function draw() {
    const article = byId("pair"), pair = order[shown];
    byId("tip").hidden = true;
    if (pair === undefined) return article.replaceChildren(element("p", "no pair has these words", "none"));
    const given = data.pairs[pair], prompt = element("div", undefined, "prompt");
    for (const [role, content] of given.prompt) {
      const words = element("div", readable(content), "text");
      words.dir = "auto";
      prompt.append(element("i", visible(role)), words);
    }
    const sides = element("div", undefined, "sides");
    sides.append(...[0, 1].map(side => sideOf(pair, side)));
    const facts = ["coverage " + percent(current.coverage[pair]), "entropy " + fixed(current.entropy[pair]) + " of uniform"];
    if (against) facts.push("disagreement with " + named_view(against.view) + " " + fixed(apart[pair]));
    article.replaceChildren(element("h2", "pair " + visible(given.id)), element("p", facts.join(" \u00b7 "), "facts"),
      ...(given.note ? [element("p", visible(given.note), "facts")] : []), prompt, sides);
  }

  function sideOf(pair, side) {
    const box = element("section", undefined, "side " + data.sides[side]), [begin, end] = range(pair, side);
    const count = end - begin;
    const facts = [count + (count === 1 ? " token" : " tokens")];
    for (const name of ["coverage", "source_coverage", "kept_mass"]) {
      const found = current.view[name][pair];
      if (found && found[side] !== null) facts.push(name.replace("_", " ") + " " + percent(found[side]));
    }
    facts.push("effective number " + fixed(current.effective[pair][side], 1));
    const text = Array.from(data.pairs[pair].texts[side]), tokens = element("div", undefined, "text tokens");
    const whole = current.view.coverage[pair]?.[side] === 1;
    tokens.dir = "auto";
    let seen = 0, place = 0;
    const spans = [];
    for (let i = begin; i < end; i++) {
      const start = place + characters[2 * i], stop = start + characters[2 * i + 1];
      place = stop;
      const ends = stop <= start, relative = current.table[current.codes[i]];
      const words = ends ? data.ends[ids[i]] ?? "" : text.slice(seen, Math.max(seen, stop)).join("");
      if (!ends) seen = Math.max(seen, stop);
      const lost = !ends && relative === 0 && !whole;
      const look = Number.isNaN(relative) ? "unknown" : lost ? "lost" : shade(relative);
      const span = element("span", visible(words) || "\u25af", look + (ends ? " end" : ""));
      span.tabIndex = spans.length || side ? -1 : 0;
      Object.assign(span.dataset, {token: i, pair, side, start, stop, place: i - begin});
      spans.push(span);
    }
    tokens.append(...spans);
    box.append(element("h3", data.sides[side]), element("p", facts.join(" \u00b7 "), "facts"), tokens);
    if (text.length > seen) box.append(element("p", text.length - seen + " characters cut", "facts"));
    return box;
  }

  // ---------------------------------------------------------------- numbers of a token

  function tell(span) {
    const {token, pair, side, start, stop, place} = span.dataset, tip = byId("tip"), table = element("table");
    const line = (name, value) => {
      const row = element("tr");
      row.append(element("th", name), element("td", value));
      table.append(row);
    };
    line("token", "id " + ids[token] + ", number " + (Number(place) + 1));
    line("characters", start === stop ? "none, at " + start : start + " to " + stop);
    for (const one of [current, against]) {
      if (!one) continue;
      const relative = one.table[one.codes[token]], lengths = one.view.lengths[pair];
      const weight = lengths ? relative / lengths[side] : NaN;
      line(named_view(one.view), Number.isNaN(relative) ? "no weight" : figures(weight) + "  (w\u00b7|y| " + figures(relative) + ")");
    }
    data.logps.forEach((model, number) => {
      const code = logps[number]?.[token];
      line("log-prob, " + model.name, code === undefined ? "..." : code === 65535 ? "not known" : fixed(-code * model.step, 3));
    });
    tip.replaceChildren(element("b", span.textContent), table);
    tip.querySelector("b").dir = "auto";
    tip.hidden = false;
    const box = span.getClientRects()[0], mine = tip.getBoundingClientRect();
    if (!box) return;
    const below = box.bottom + 8 + mine.height < innerHeight;
    tip.style.left = Math.max(6, Math.min(innerWidth - mine.width - 6, box.left)) + "px";
    tip.style.top = (below ? box.bottom + 8 : Math.max(6, box.top - mine.height - 8)) + "px";
  }

  function step(span, key) {
    const spans = [...document.querySelectorAll("#pair .tokens span")], place = spans.indexOf(span);
    const back = getComputedStyle(span.parentElement).direction === "rtl" ? "ArrowRight" : "ArrowLeft";
    const next = {[back]: place - 1, [back === "ArrowLeft" ? "ArrowRight" : "ArrowLeft"]: place + 1,
      Home: 0, End: spans.length - 1}[key];
    if (next === undefined || !spans[next]) return false;
    span.tabIndex = -1;
    spans[next].tabIndex = 0;
    spans[next].focus();
    return true;
  }

  // ---------------------------------------------------------------- a reader's hands

  function listen() {
    byId("controls").addEventListener("submit", event => event.preventDefault());
    byId("search").addEventListener("input", arrange);
    const again = () => { shown = 0; order = []; arrange(); };
    byId("direction").addEventListener("change", again);
    byId("sort").addEventListener("change", () => {
      byId("direction").value = byId("sort").value === "disagreement" ? "-1" : "1";
      again();
    });
    for (const name of ["source", "layer", "round"]) byId(name).addEventListener("change", () => { offer(); choose(); });
    byId("other").addEventListener("change", () => { byId("other").dataset.chosen = "yes"; choose(); });
    byId("list").addEventListener("scroll", rows);
    addEventListener("resize", rows);
    byId("list").addEventListener("click", event => {
      const row = event.target.closest(".row");
      if (row) go(Number(row.dataset.place));
    });
    byId("list").addEventListener("keydown", event => {
      const page = Math.max(1, Math.floor(byId("list").clientHeight / ROW) - 1);
      const to = {ArrowDown: shown + 1, ArrowUp: shown - 1, PageDown: shown + page, PageUp: shown - page, Home: 0,
        End: order.length - 1}[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    });
    const article = byId("pair"), token = event => event.target.closest("[data-token]");
    for (const kind of ["mouseover", "focusin"])
      article.addEventListener(kind, event => { if (token(event)) tell(token(event)); });
    for (const kind of ["mouseleave", "focusout", "scroll"])
      article.addEventListener(kind, () => { byId("tip").hidden = true; });
    article.addEventListener("keydown", event => {
      if (token(event) && step(token(event), event.key)) event.preventDefault();
    });
    addEventListener("keydown", event => {
      const typing = event.target.closest("input, select");
      if (event.key === "Escape") {
        byId("tip").hidden = true;
        if (typing) byId("list").focus();
      }
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
      if (event.key === "j") go(shown + 1);
      if (event.key === "k") go(shown - 1);
    });
  }

  function legend() {
    const names = data.legend.map(([name, value]) => element("span", name, shade(value)));
    if (data.views.some(view => view.signed)) names.push(element("span", "negative", "v" + data.levels));
    byId("legend").append("weight relative to uniform (w\u00b7|y|)", ...names,
      element("span", "no partner in the source's tokens", "lost"));
  }

  let logps = [];

  async function start() {
    data = JSON.parse(new TextDecoder().decode(await bytes("texts")));
    [ids, characters] = (await Promise.all(["ids", "characters"].map(bytes))).map(one => new Int32Array(one));
    first = [0];
    for (const pair of data.pairs) for (const count of pair.counts) first.push(first.at(-1) + count);
    fill(byId("source"), distinct(data.views.map(view => view.source)));
    offer();
    const worst = Math.max(...data.views.map(view => view.error));
    byId("about").textContent = (data.note ? readable(data.note) + " \u00b7 " : "") + data.pairs.length + (data.pairs.length === 1 ? " pair" : " pairs") + " \u00b7 "
      + "weights to within " + (100 * worst).toFixed(1)
      + " % of each \u00b7 keys: / search, j and k or arrows in the list for pairs, Tab and arrows for tokens";
    legend();
    await choose();
    listen();
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    performance.mark("drawn");
    logps = await Promise.all(data.logps.map(async (_, number) => new Uint16Array(await bytes("logps-" + number))));
    document.documentElement.dataset.ready = "yes";
  }

  return {start, visible, decoded, state: () => ({order, shown, coverage: current.coverage, entropy: current.entropy, apart})};
})();
explorer.start().catch(problem => {
  document.getElementById("about").textContent = "the weights could not be read: " + problem;
  console.error(problem);
});
