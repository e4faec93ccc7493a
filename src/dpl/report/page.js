// One experiment: reads its data, follows its controls, draws its pictures.

const CLASS_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999933", "#332288", "#882255",
  "#44aa99"];
const OTHERS = "#9a9a9a";

class Experiment {
  constructor(root) {
    this.root = root;
    this.data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    this.find = (name) => root.querySelector(`[data-part="${name}"]`);
    this.streams = this.find("stream");
    this.methods = this.find("method");
    for (const control of [this.streams, this.methods]) control?.addEventListener("change", () => this.draw());
    root.querySelectorAll(".legend input").forEach((box) => box.addEventListener("change", () => this.drawLines()));
    root.querySelectorAll("[data-show]").forEach((button) => button.addEventListener("click", () => this.showAll(button.dataset.show === "all")));
    this.start = [...root.querySelectorAll(".legend input")].map((box) => box.checked);
    this.draw();
    let width = root.clientWidth;
    new ResizeObserver(() => {
      if (Math.abs(root.clientWidth - width) < 2) return;
      width = root.clientWidth;
      this.draw();
    }).observe(root);
  }

  get stream() { return Number(this.streams?.value || 0); }
  get method() { return Number(this.methods?.value || 0); }
  get compared() { return this.data.reference !== null && this.data.reference !== this.method; }
  name(number) { return this.data.methods[number].name; }

  showAll(all) {
    this.root.querySelectorAll(".legend input").forEach((box, i) => { box.checked = all || this.start[i]; });
    this.drawLines();
  }

  draw() {
    this.root.querySelectorAll("[data-name]").forEach((place) => {
      place.textContent = { stream: this.data.streams[this.stream], method: this.name(this.method) }[place.dataset.name];
    });
    this.drawLines();
    this.drawDumbbells("by-domain", this.data.by_domain[this.method], 2);  // one domain is the stream itself
    this.drawDumbbells("by-class", this.data.by_class[this.stream][this.method], 0);
    this.drawConfusion();
    this.drawBalance();
    this.drawPictures();
  }

  drawLines() {
    const lines = this.data.lines[this.stream];
    const shown = [...this.root.querySelectorAll(".legend input")].map((box) => box.checked);
    const labels = { accuracy: "Cumulative accuracy", confidence: "Mean confidence", agreement: "Same prediction as the source model" };
    for (const [kind, label] of Object.entries(labels)) {
      const host = this.find(kind);
      if (!host || !lines) continue;
      const series = this.data.methods.map((method, i) => ({ ...method, band: (lines[kind] || [])[i], chosen: i === this.method,
        events: this.data.events.filter((event) => event.method === i) }))
        .filter((_, i) => shown[i] && !(kind === "agreement" && i === this.data.reference));
      lineChart(host, { seen: kind === "accuracy" ? lines.seen : lines.ends, series, label, floor: 0, ceiling: 100 });
    }
  }

  drawDumbbells(part, rows, least) {
    const host = this.find(part);
    if (!host) return;
    host.closest("figure").hidden = rows.length < least;
    const label = `Accuracy of ${this.name(this.method)} ${part.replace("-", " ")}`;
    if (rows.length >= least) dumbbells(host, { rows, colour: this.data.methods[this.method].colour, label });
  }

  drawConfusion() {
    const [left, right] = [this.find("confusion-source"), this.find("confusion-method")];
    if (!right) return;
    const after = this.data.confusion[this.stream][this.method];
    const before = this.compared ? this.data.confusion[this.stream][this.data.reference] : null;
    const classes = this.data.classes;
    const table = (host, found, name) => {
      host.replaceChildren();
      if (found?.counts) confusionTable(host, { counts: found.counts, classes, caption: `${name}: rows are true classes` });
    };
    table(left, before, "source");
    table(right, after, this.name(this.method));
    left.hidden = !left.childElementCount;
    if (after?.mistakes) mistakeTable(right, { before: before?.mistakes, after: after.mistakes, classes, names: ["source", this.name(this.method)] });
    if (!after) right.append(element("p", { class: "faint" }, "The predictions of this method are missing."));
  }

  drawBalance() {
    const balance = this.data.balance[this.stream];
    const key = this.find("balance-key");
    if (!balance || !key) return;
    const names = [...balance.classes.map((number) => this.data.classes[number]), "other classes"];
    const colours = [...balance.classes.map((_, i) => CLASS_COLOURS[i]), OTHERS];
    const few = this.data.classes.length <= balance.classes.length;
    const cut = (list) => (few && list ? list.slice(0, -1) : list);
    key.replaceChildren(...cut(names).map((name, i) => element("span", {}, element("i", { "--c": colours[i] }), name)));
    const panels = { "balance-truth": [balance.truth, "True classes"],
      "balance-source": [this.compared ? balance.methods[this.data.reference] : null, "Classes that the source model predicts"],
      "balance-method": [balance.methods[this.method], `Classes that ${this.name(this.method)} predicts`] };
    for (const [part, [shares, label]] of Object.entries(panels)) {
      const host = this.find(part);
      if (!host) continue;
      host.closest("figure").hidden = !shares && part !== "balance-method";
      if (!host.closest("figure").hidden) areaChart(host, { ends: balance.ends, shares: cut(shares), names: cut(names), colours, label });
    }
  }

  drawPictures() {
    const host = this.find("pictures");
    if (!host || !this.data.pictures.length) return;
    host.replaceChildren();
    const shown = this.data.shown[this.stream][this.method] || {};
    const titles = { corrected: "Corrected: the source model is wrong, the adapted model is right",
      spoiled: "Spoiled: the source model is right, the adapted model is wrong", changed: "Predicted differently from the source model" };
    for (const [kind, title] of Object.entries(titles)) {
      if (!shown[kind]?.length) continue;
      host.append(element("h5", {}, title), element("ul", { class: "pictures" }, ...shown[kind].map((entry) => this.picture(entry))));
    }
    if (!host.childElementCount) host.append(element("p", { class: "faint" }, "Every image of this stream is predicted as by the source model."));
  }

  picture([number, label, before, after, share]) {
    const classes = this.data.classes;
    const called = (number) => classes[number] ?? `class ${number}`;
    const truth = label === null ? "an image" : called(label);
    const words = `${called(before)} → ${called(after)}, ${share}\u00a0%`;
    const [address, file] = this.data.pictures[number];
    const image = element("img", { src: address, class: address.startsWith("data:image/png") ? "tiny" : null, title: file,
      alt: `${truth}; the source model predicts ${called(before)}; ${this.name(this.method)} predicts ${called(after)} with ${share} % confidence` });
    return element("li", {}, image, element("b", {}, label === null ? file : truth), element("br"), words);
  }
}

// Tables: a click on a heading sorts by its column, first the best on top.
function sortable(table) {
  table.querySelectorAll("thead button").forEach((button) => button.addEventListener("click", () => {
    const cell = button.closest("th");
    const column = [...cell.parentNode.children].indexOf(cell);
    const rising = cell.getAttribute("aria-sort") === "descending";
    cell.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const value = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
    const compare = (a, b) => (Number(value(a)) - Number(value(b))) || (Number.isNaN(Number(value(a))) ? value(b).localeCompare(value(a)) : 0);
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => (rising ? compare(a, b) : compare(b, a))));
  }));
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".experiment").forEach((root) => new Experiment(root));
document.documentElement.dataset.ready = "yes";
