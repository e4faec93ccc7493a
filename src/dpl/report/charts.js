"use strict";
// Charts in SVG. Everything that comes from data is set as text or attribute, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "line", "polyline", "polygon", "circle", "text", "rect", "title"].includes(tag);
  const node = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function ticks(low, high, count) {
  const rough = Math.max(high - low, 1e-9) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + 1e-9; value += step) found.push(+value.toFixed(6));
  return found;
}

function scale(low, high, from, to) {
  const factor = (to - from) / Math.max(high - low, 1e-9);
  return (value) => from + (value - low) * factor;
}

function frame(host, height, label) {
  const width = Math.max(260, Math.round(host.clientWidth));
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  return { svg, width, left: 40, right: width - 12, top: 10, bottom: height - 38 };
}

function axes(box, xs, ys, x, y, xTitle) {
  const group = element("g", { class: "axis" });
  for (const value of ys) {
    group.append(element("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
      element("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  }
  for (const value of xs) {
    group.append(element("text", { x: x(value), y: box.bottom + 16, "text-anchor": "middle" }, value.toLocaleString("en")));
  }
  group.append(element("text", { x: (box.left + box.right) / 2, y: box.bottom + 33, "text-anchor": "middle" }, xTitle));
  box.svg.append(group);
}

// Lines over the images seen. series: [{name, colour, dash, chosen, band: {mean, low?, high?}, events: [{seen, text, alarm}]}]
function lineChart(host, { seen, series, label, floor = -Infinity, ceiling = Infinity }) {
  host.replaceChildren();
  const drawn = series.filter((line) => line.band);
  if (!drawn.length || !seen.length) return host.append(element("p", { class: "faint" }, "Nothing to draw here."));
  const ends = drawn.map((line) => `${line.name} ends at ${line.band.mean.at(-1).toFixed(1)} %`).join(", ");
  const box = frame(host, host.clientWidth >= 700 ? 340 : 280, `${label}, over ${seen.at(-1).toLocaleString("en")} images: ${ends}. Arrow keys read the values.`);
  const named = box.width >= 700 && drawn.length <= 14;
  if (named) box.right -= 22 + 6.5 * Math.max(...drawn.map((line) => line.name.length + 5));
  const values = drawn.flatMap((line) => [...(line.band.low || line.band.mean), ...(line.band.high || line.band.mean)]);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const margin = Math.max((most - least) * 0.06, 1);
  const [low, high] = [Math.max(floor, least - margin), Math.min(ceiling, most + margin)];
  const x = scale(Math.min(seen[0], seen.at(-1) - 1), seen.at(-1), box.left, box.right);
  const y = scale(low, high, box.bottom, box.top);
  axes(box, ticks(seen[0], seen.at(-1), box.width / 110), ticks(low, high, 6), x, y, "images seen");
  const points = (line) => line.map((value, i) => `${x(seen[i]).toFixed(1)},${y(value).toFixed(1)}`);
  for (const line of drawn) {
    if (!line.band.low) continue;
    box.svg.append(element("polygon", { class: "band", "--c": line.colour,
      points: [...points(line.band.low), ...points(line.band.high).reverse()].join(" ") }));
  }
  for (const line of [...drawn].sort((a, b) => (a.chosen || 0) - (b.chosen || 0))) {
    box.svg.append(element("polyline", { class: line.chosen ? "line chosen" : "line", "--c": line.colour,
      "stroke-dasharray": line.dash || null, points: points(line.band.mean).join(" "), "data-method": line.name }));
  }
  for (const line of drawn) markEvents(box, line, seen, x, y);
  if (named) nameEnds(box, drawn, y);
  host.append(box.svg);
  readValues(host, box, { seen, x, y, drawn });
}

// What the guard did, as rings on the line of its method; a title tells more.
function markEvents(box, line, seen, x, y) {
  for (const event of line.events || []) {
    const next = seen.findIndex((images) => images >= event.seen);
    const place = next < 0 ? seen.length - 1 : next;
    box.svg.append(element("circle", { class: event.alarm ? "event alarm" : "event", "--c": line.colour, r: 4.5,
      cx: x(seen[place]), cy: y(line.band.mean[place]) }, element("title", {}, event.text)));
  }
}

// Each line's name and last value at its right end, moved apart where they would overlap.
function nameEnds(box, drawn, y) {
  const marks = drawn.map((line) => ({ line, place: y(line.band.mean.at(-1)) })).sort((a, b) => a.place - b.place);
  marks.forEach((mark, i) => { if (i) mark.place = Math.max(mark.place, marks[i - 1].place + 15); });
  let limit = box.bottom;
  for (const mark of [...marks].reverse()) {
    mark.place = Math.min(mark.place, limit);
    limit = mark.place - 15;
  }
  for (const { line, place } of marks) {
    box.svg.append(element("circle", { class: "fill", "--c": line.colour, cx: box.right + 12, cy: place, r: 4 }),
      element("text", { class: "strong", x: box.right + 20, y: place + 4, "font-weight": line.chosen ? 700 : null },
        `${line.name} ${line.band.mean.at(-1).toFixed(1)}`));
  }
}

// A cursor that follows the pointer or the arrow keys, and shows the values there.
function readValues(host, box, { seen, x, y, drawn }) {
  const cursor = element("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const tip = element("div", { class: "tip", hidden: "" });
  const spoken = element("div", { class: "skip", "aria-live": "polite" });
  let at = seen.length - 1;
  const hide = () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; };
  const show = (index) => {
    at = Math.max(0, Math.min(seen.length - 1, index));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(seen[at]));
    cursor.setAttribute("visibility", "visible");
    const sorted = [...drawn].sort((a, b) => b.band.mean[at] - a.band.mean[at]);
    tip.replaceChildren(element("div", {}, `after ${seen[at].toLocaleString("en")} images`));
    for (const line of sorted.slice(0, 14)) {
      const name = element("span", {}, element("i", { "--c": line.colour }), line.name);
      tip.append(element("div", {}, name, element("b", {}, `${line.band.mean[at].toFixed(1)} %`)));
    }
    tip.hidden = false;
    const share = host.clientWidth / box.width;
    const place = x(seen[at]) * share;
    const leftward = place > host.clientWidth / 2;
    tip.style.left = leftward ? "auto" : `${place + 10}px`;
    tip.style.right = leftward ? `${host.clientWidth - place + 10}px` : "auto";
    return sorted;
  };
  const speak = (sorted) => {
    spoken.textContent = `After ${seen[at]} images: ${sorted.map((l) => `${l.name} ${l.band.mean[at].toFixed(1)} %`).join(", ")}`;
  };
  box.svg.setAttribute("tabindex", "0");
  box.svg.addEventListener("pointermove", (event) => {
    const bounds = box.svg.getBoundingClientRect();
    const place = (event.clientX - bounds.left) * box.width / bounds.width;
    let nearest = 0;
    seen.forEach((value, i) => { if (Math.abs(x(value) - place) < Math.abs(x(seen[nearest]) - place)) nearest = i; });
    show(nearest);
  });
  box.svg.addEventListener("pointerleave", hide);
  box.svg.addEventListener("blur", hide);
  box.svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    speak(show(at + step));
  });
  box.svg.append(cursor);
  host.append(tip, spoken);
}

// Shares of classes over the stream, stacked. shares: one list of percentages for each class.
function areaChart(host, { ends, shares, names, colours, label }) {
  host.replaceChildren();
  if (!shares || !ends.length) return host.append(element("p", { class: "faint" }, "Not recorded."));
  const totals = shares.map((part) => part.reduce((sum, value) => sum + value, 0) / part.length);
  const told = names.map((name, i) => `${name} ${totals[i].toFixed(0)} %`).join(", ");
  const box = frame(host, 210, `${label}: ${told}`);
  const starts = [0, ...ends.slice(0, -1)];
  const middles = ends.map((end, i) => (end + starts[i]) / 2);
  if (ends.length === 1) { middles.splice(0, 1, 0, ends[0]); }
  const x = scale(middles[0], middles.at(-1), box.left, box.right);
  const y = scale(0, 100, box.bottom, box.top);
  axes(box, ticks(middles[0], middles.at(-1), Math.max(4, box.width / 120)), [0, 50, 100], x, y, "images seen");
  const below = middles.map(() => 0);
  shares.forEach((part, number) => {
    const lower = middles.map((place, i) => `${x(place).toFixed(1)},${y(below[i]).toFixed(1)}`);
    middles.forEach((_, i) => { below[i] += part[Math.min(i, part.length - 1)]; });
    const upper = middles.map((place, i) => `${x(place).toFixed(1)},${y(below[i]).toFixed(1)}`);
    box.svg.append(element("polygon", { class: "fill", "--c": colours[number], points: [...upper, ...lower.reverse()].join(" ") },
      element("title", {}, `${names[number]}: ${totals[number].toFixed(1)} % on average`)));
  });
  host.append(box.svg);
}

// From the source model (ring) to the adapted model (dot), line by line. rows: [{name, note, before, after, gain}]
function dumbbells(host, { rows, colour, label }) {
  host.replaceChildren();
  if (!rows.length) return host.append(element("p", { class: "faint" }, "Nothing to compare here."));
  const told = rows.map((row) => `${row.name} ${row.after.toFixed(1)} %${row.before === null ? "" : `, source model ${row.before.toFixed(1)} %`}`);
  const box = frame(host, 24 * rows.length + 48, `${label}: ${told.join("; ")}`);
  const longest = Math.max(...rows.map((row) => row.name.length));
  box.left = Math.min(Math.max(60, longest * 7 + 10), box.width * 0.36);
  box.right = box.width - 52;
  const values = rows.flatMap((row) => (row.before === null ? [row.after] : [row.before, row.after]));
  const low = Math.max(0, Math.min(...values) - 4);
  const high = Math.min(100, Math.max(...values) + 4);
  const x = scale(low, high, box.left + 8, box.right - 8);
  for (const value of ticks(low, high, Math.max(3, box.width / 110))) {
    box.svg.append(element("line", { class: "tick", x1: x(value), x2: x(value), y1: 4, y2: box.bottom }),
      element("text", { x: x(value), y: box.bottom + 16, "text-anchor": "middle" }, String(value)));
  }
  box.svg.append(element("text", { x: (box.left + box.right) / 2, y: box.bottom + 32, "text-anchor": "middle" }, "accuracy %"));
  const most = Math.floor((box.left - 8) / 6.6);
  rows.forEach((row, number) => {
    const y = 16 + 24 * number;
    const name = row.name.length > most ? `${row.name.slice(0, most - 1)}…` : row.name;
    const group = element("g", {}, element("title", {}, `${told[number]}${row.note ? ` (${row.note})` : ""}`),
      element("text", { class: "strong", x: box.left - 6, y: y + 4, "text-anchor": "end" }, name));
    if (row.before !== null) {
      const tone = row.gain > 0 ? "up" : row.gain < 0 ? "down" : "";
      group.append(element("line", { class: "line", "--c": colour, x1: x(row.before), x2: x(row.after), y1: y, y2: y }),
        element("circle", { class: "ring", "--c": "#7f7f7f", cx: x(row.before), cy: y, r: 5 }),
        element("text", { class: tone, x: box.width - 4, y: y + 4, "text-anchor": "end" },
          `${row.gain < 0 ? "−" : "+"}${Math.abs(row.gain).toFixed(1)}`));
    }
    group.append(element("circle", { class: "fill", "--c": colour, cx: x(row.after), cy: y, r: 5.5 }));
    box.svg.append(group);
  });
  host.append(box.svg);
}

function confusionTable(host, { counts, classes, caption }) {
  host.replaceChildren();
  const head = element("tr", {}, element("th", { scope: "col" }, "true \\ predicted"));
  for (const name of classes) head.append(element("th", { scope: "col" }, element("span", {}, name)));
  const body = element("tbody");
  counts.forEach((row, truth) => {
    const total = row.reduce((sum, value) => sum + value, 0);
    const line = element("tr", {}, element("th", { scope: "row" }, classes[truth]));
    row.forEach((count, answer) => {
      const share = total ? count / total : 0;
      line.append(element("td", { "--share": (0.62 * share).toFixed(3), class: truth === answer ? "hit" : null,
        title: `${classes[truth]} taken for ${classes[answer]}: ${count} of ${total}` }, count ? String(count) : "·"));
    });
    body.append(line);
  });
  host.append(element("table", { class: "confusion" }, element("caption", {}, caption), element("thead", {}, head), body));
}

function mistakeTable(host, { before, after, classes, names }) {
  host.replaceChildren();
  const counts = new Map();
  const add = (list, place) => (list || []).forEach(([truth, answer, times]) => {
    const key = `${truth} ${answer}`;
    if (!counts.has(key)) counts.set(key, [truth, answer, null, null]);
    counts.get(key)[place] = times;
  });
  add(after, 3);
  add(before, 2);
  const body = element("tbody");
  for (const [truth, answer, old, now] of [...counts.values()].slice(0, 24)) {
    body.append(element("tr", {}, element("th", { scope: "row" }, classes[truth]), element("td", { class: "words" }, classes[answer]),
      element("td", {}, old === null ? "fewer" : String(old)), element("td", {}, now === null ? "fewer" : String(now))));
  }
  const head = element("tr", {}, ...["true class", "taken for", ...names].map((name) => element("th", { scope: "col" }, name)));
  const caption = element("caption", {}, "The largest confusions, by number of images");
  host.append(element("table", { class: "mistakes" }, caption, element("thead", {}, head), body));
}
