// Parts of the page: elements, figures as text, tables, and strips and charts as SVG. All text is set as text nodes.
export const SOURCES = ["prefix-exact", "reused", "recomputed", "computed"];

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export const alertOf = (text) => element("p", { class: "error", role: "alert" }, text);

export const seconds = (value) =>
  value === null || value === undefined ? "-" : value >= 1 ? `${value.toFixed(2)} s` : `${Math.round(value * 1000)} ms`;
export const duration = (value) => (value === null ? "-" : value < 120 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(1)} min`);
export const percent = (value) => `${Math.round(value * 100)} %`;
export const count = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
export const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString("en-GB");
export const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

export function size(bytes) {
  const units = ["B", "KiB", "MiB"];
  let value = bytes;
  for (const unit of units) {
    if (value < 1024) return `${Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} GiB`;
}

export function median(values) {
  const sorted = values.filter((value) => value !== null).sort((one, other) => one - other);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// A value of a method's parameter, as reports have them.
export function parameter(value) {
  if (value === null) return "all";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (Array.isArray(value)) return value.map(parameter).join(" ");
  if (typeof value === "object") return Object.entries(value).map(([name, one]) => `${name} ${parameter(one)}`).join(", ");
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
}

export function tiles(list, entries) {
  list.replaceChildren(...entries.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value))));
}

// Headings are [text, class]; a row is a list of cells, each a text or a node. A wide table scrolls; no word breaks.
export function table(headings, rows) {
  const cells = (row, name) => row.map((cell, at) => element(name, { class: headings[at][1] }, cell));
  const head = element("thead", {}, element("tr", {}, ...cells(headings.map(([text]) => text), "th")));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td"))));
  return element("div", { class: "wide" }, element("table", {}, head, body));
}

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function picture(className, width, height, label, rects) {
  const attributes = { class: className, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  return svg("svg", attributes, ...rects);
}

function rect(kind, [x, y, width, height], label) {
  const title = svg("title", {});
  title.textContent = label;
  return svg("rect", { class: kind, x: x.toFixed(2), y: y.toFixed(2), width: width.toFixed(2), height: height.toFixed(2) }, title);
}

// Bars of a line of length 1, stretched to the page; `style` attributes would need a weaker content policy.
export function strip(bars, marks, label, height = 28) {
  const drawn = bars.map((bar) => rect(bar.kind, [bar.start * 1000, 0, bar.width * 1000, height], bar.label));
  const marked = marks.map((mark) => rect("mark", [mark.start * 1000, height * 0.55, Math.max(mark.width * 1000, 1.2), height * 0.45], mark.label));
  return picture("strip", 1000, height, label, [...drawn, ...marked]);
}

export function legend(kinds, shares = {}) {
  const swatch = (kind) => svg("svg", { class: `swatch ${kind}`, viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10 }));
  const text = (kind) => (kind in shares ? `${kind} ${percent(shares[kind])}` : kind);
  return element("ul", { class: "legend" }, ...kinds.map((kind) => element("li", { class: "name" }, swatch(kind), text(kind))));
}

// A column for each request, the newest on the right: the share of its prompt's tokens by the source of their KV.
export function columns(requests, most) {
  const rects = [];
  requests.slice(0, most).forEach((request, age) => {
    let from = 0;
    for (const kind of SOURCES) {
      const tokens = request.tokens_by_source[kind];
      const share = tokens / Math.max(1, request.prompt_tokens);
      const label = `${request.method}: ${tokens} tokens ${kind}`;
      if (share) rects.push(rect(kind, [10 * (most - 1 - age), 100 - 100 * (from + share), 8.5, 100 * share], label));
      from += share;
    }
  });
  return picture("chart", 10 * most, 100, "share of each prompt's tokens by the source of their KV, the newest on the right", rects);
}
