"use strict";
const stories = JSON.parse(document.getElementById("stories").textContent);
const rows = [...document.querySelectorAll("#cells tbody tr")];
const kept = rows.map((row) => ({
  row,
  words: row.dataset.words,
  chapter: row.dataset.chapter,
  verdicts: new Set([...row.querySelectorAll("button")].map((cell) => cell.dataset.verdict)),
}));
const text = document.getElementById("text");
const chapter = document.getElementById("chapter");
const verdict = document.getElementById("verdict");

function filter() {
  const words = text.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  let shown = 0;
  for (const each of kept) {
    const fits = (!words.length || words.some((word) => each.words.includes(word)))
      && (!chapter.value || each.chapter === chapter.value)
      && (!verdict.value || each.verdicts.has(verdict.value));
    each.row.classList.toggle("hidden", !fits);
    shown += fits;
  }
  document.getElementById("shown").textContent = `${shown} of ${kept.length} requirements`;
}
for (const control of [text, chapter, verdict]) control.addEventListener("input", filter);
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());

function element(name, content, ...classes) {
  const made = document.createElement(name);
  made.textContent = content;
  made.classList.add(...classes);
  return made;
}

function group(each) {
  const box = element("div", "", "group");
  const title = element("h3", "");
  title.append(element("span", each.verdict, each.verdict.replaceAll(" ", "-")), ` ${each.variant || "no variant"}, cases: ${each.cases}`);
  box.append(title);
  if (each.message) box.append(element("p", each.message));
  if (each.blamed && each.blamed.length) box.append(element("p", `ranks at fault: ${each.blamed.join(", ")}`));
  if (each.compared && each.compared.elements + each.compared.pairs) {
    const worst = each.worst ? `; largest error: ${each.worst.toPrecision(3)} of what is allowed` : "";
    box.append(element("p", `compared: ${each.compared.elements} elements, ${each.compared.pairs} pairs${worst}`));
  }
  if (each.detail) box.append(element("pre", each.detail));
  if (each.reproduce) box.append(element("pre", each.reproduce));
  if (each.workloads && each.workloads.length) {
    const more = document.createElement("details");
    more.append(element("summary", `workloads: ${each.workloads.length}`), element("p", each.workloads.join(", ")));
    box.append(more);
  }
  return box;
}

const dialog = document.getElementById("story");
let opener = null;
document.getElementById("cells").addEventListener("click", (event) => {
  const cell = event.target.closest("button[data-story]");
  if (!cell) return;
  opener = cell;
  const row = cell.closest("tr").querySelector("th");
  document.getElementById("story-title").textContent = cell.dataset.story.replace(" ", " on ");
  document.getElementById("story-sentence").textContent = row.title;
  document.getElementById("story-body").replaceChildren(...stories[cell.dataset.story].map(group));
  dialog.showModal();
});
dialog.addEventListener("close", () => opener && opener.focus());
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
document.getElementById("cells").addEventListener("keydown", (event) => {
  const step = steps[event.key];
  const cell = event.target.closest("td");
  if (!step || !cell) return;
  event.preventDefault();
  const shown = rows.filter((row) => !row.classList.contains("hidden"));
  let [y, x] = [shown.indexOf(cell.parentElement), cell.cellIndex];
  for (;;) {
    [y, x] = [y + step[0], x + step[1]];
    const next = shown[y]?.cells[x];
    if (!next || x < 1) return;
    const found = next.querySelector("button");
    if (found) return found.focus();
  }
});
