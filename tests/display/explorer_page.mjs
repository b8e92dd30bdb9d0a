// Runs an explorer's script in node, on a document just large enough, and prints what it drew: node explorer_page.mjs PAGE
import fs from "node:fs";

const page = fs.readFileSync(process.argv[2], "utf8"), made = {};
const held = Object.fromEntries([...page.matchAll(/id="(data-[^"]*)">([^<]*)</g)].map(found => [found[1], found[2]]));

function node(tag) {
  const one = {tag, children: [], dataset: {}, style: {}, textContent: "", className: "", value: "", scrollTop: 0};
  const ignored = ["setAttribute", "removeAttribute", "addEventListener"];
  for (const name of ignored) one[name] = () => {};
  one.append = (...children) => { one.children.push(...children); };
  one.replaceChildren = (...children) => {
    one.children = children;
    if (tag === "select" && children.length) one.value = String(children[0].value);
  };
  one.querySelector = () => node("div");
  return Object.assign(one, {clientHeight: 500});
}

function byId(id) {
  const tag = ["source", "layer", "round", "other"].includes(id) ? "select" : "div";
  return made[id] ??= Object.assign(node(tag), {id, textContent: held[id] ?? ""});
}

Object.assign(globalThis, {
  document: {getElementById: byId, createElement: node, querySelectorAll: () => Object.keys(held).map(byId),
    addEventListener: () => {}, documentElement: node("html")},
  addEventListener: () => {}, requestAnimationFrame: done => setTimeout(done, 0),
});
Object.assign(byId("sort"), {value: "order"});
Object.assign(byId("direction"), {value: "1"});
globalThis.eval(page.match(/<script>\n("use strict"[\s\S]*?)<\/script>/)[1]);
for (let wait = 0; wait < 500 && !document.documentElement.dataset.ready; wait++) await new Promise(done => setTimeout(done, 10));
const all = one => typeof one === "string" ? [] : [one, ...one.children.flatMap(all)];
const tokens = all(byId("pair")).filter(one => one.dataset.token !== undefined);
console.log(JSON.stringify({about: byId("about").textContent,
  tokens: tokens.map(one => [one.dataset.side, one.textContent, one.className])}));
