"use strict";
// Says more about what a reader points at. Everything is drawn without this.
const all = (query, root = document) => [...root.querySelectorAll(query)];
const make = (tag, text = "", className = "") => Object.assign(document.createElement(tag), { textContent: text, className });

// Charts: all values at one x, by pointer, touch or keyboard.
const tip = document.getElementById("tip");
function show(column, x, y) {
  const buttons = new Map(all("[data-toggle]", column.closest("figure")).map((button) => [button.dataset.toggle, button]));
  const rows = JSON.parse(column.dataset.rows).filter(([name]) => buttons.get(name).getAttribute("aria-pressed") === "true");
  tip.replaceChildren(make("b", column.dataset.title), ...rows.map(([name, text]) => {
    const line = make("div");
    line.append(buttons.get(name).querySelector("svg").cloneNode(true), make("span", `${name}: ${text}`));
    return line;
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const beside = x + 18 + width > innerWidth ? x - 18 - width : x + 18;
  tip.style.left = `${Math.max(6, Math.min(beside, innerWidth - width - 6))}px`;
  tip.style.top = `${Math.max(6, Math.min(y - height - 14 > 6 ? y - height - 14 : y + 18, innerHeight - height - 6))}px`;
}
const hide = () => { tip.hidden = true; };
for (const column of all(".column")) {
  column.addEventListener("pointermove", (event) => show(column, event.clientX, event.clientY));
  column.addEventListener("pointerdown", (event) => show(column, event.clientX, event.clientY));
  column.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  column.addEventListener("focus", () => {
    const { right, top } = column.getBoundingClientRect();
    if (column.matches(":focus-visible")) show(column, right, top + 60);
  });
  column.addEventListener("blur", hide);
}
addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
for (const button of all("[data-toggle]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    for (const line of all("[data-series]", button.closest("figure")))
      if (line.dataset.series === button.dataset.toggle) line.classList.toggle("off", !on);
  });
}

// The atlas: one head in all maps at once.
const select = document.getElementById("head");
if (select) {
  const rows = JSON.parse(document.getElementById("heads").textContent);
  const says = JSON.parse(document.getElementById("says").textContent);
  const abouts = JSON.parse(document.getElementById("abouts").textContent);
  const choose = (head) => {
    for (const cell of all(".cell.chosen")) cell.classList.remove("chosen");
    for (const cell of all(`.cell[data-head="${head}"]`)) cell.classList.add("chosen");
    select.value = head;
    const list = make("dl");
    for (const [label, text] of rows[head]) list.append(make("dt", says[label]), make("dd", text));
    const name = select.options[head].textContent;
    document.getElementById("scores").replaceChildren(make("h3", abouts[head] ? `${name}: ${abouts[head]}` : name), list);
  };
  select.addEventListener("change", () => choose(Number(select.value)));
  for (const cell of all(".cell"))
    for (const kind of ["pointerenter", "click"]) cell.addEventListener(kind, () => choose(Number(cell.dataset.head)));
  choose(0);
}

// Mixing matrices: what the row under the pointer draws on. A byte b of the lower triangle stands for the share (b / 255)^2.
for (const figure of all(".mixing")) {
  const weights = Uint8Array.from(atob(figure.dataset.rows), (letter) => letter.charCodeAt(0));
  const spans = all(".tokens span", figure), image = figure.querySelector("img"), said = figure.querySelector(".said");
  const paint = (row, column) => {
    const start = (row * (row + 1)) / 2;
    spans.forEach((span, i) => {
      span.style.setProperty("--share", i <= row ? (weights[start + i] / 255) ** 2 : 0);
      span.classList.toggle("from", column !== null && i === row);
    });
    const share = column === null ? 0 : 100 * (weights[start + column] / 255) ** 2;
    said.textContent = column === null
      ? "the last token draws on"
      : `token ${row + 1} “${spans[row].textContent}” draws ${share.toFixed(1)}% from token ${column + 1} “${spans[column].textContent}”`;
  };
  const point = (event) => {
    const box = image.getBoundingClientRect(), at = (offset, size) => Math.floor((offset / size) * spans.length);
    const row = Math.max(0, Math.min(spans.length - 1, at(event.clientY - box.top, box.height)));
    paint(row, Math.max(0, Math.min(row, at(event.clientX - box.left, box.width))));
  };
  image.addEventListener("pointermove", point);
  image.addEventListener("pointerdown", point);
  image.addEventListener("pointerleave", () => paint(spans.length - 1, null));
}

// Paper has no folds.
addEventListener("beforeprint", () => { for (const fold of all("details")) fold.open = true; });
