"use strict";
// Without this script everything can be read; it adds the zoom and the search.
const zoom = document.querySelector(".zoom");
zoom.hidden = false;
zoom.querySelector("input").addEventListener("input", (event) => {
  document.querySelector(".lanes").style.width = `${100 * 2 ** event.target.value}%`;
});

const search = document.querySelector(".search");
if (search) {
  const [text, onlyDifferent] = search.querySelectorAll("input");
  const steps = [...document.querySelectorAll("details.values")].map((element) => {
    const name = element.querySelector("summary").textContent.split(" ").slice(0, 2).join(" ");
    const rows = [...element.querySelectorAll("li")].map((row) => [row, row.textContent.toLowerCase()]);
    return [element, name, rows, element.open];
  });
  const find = () => {
    const words = text.value.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
    const asked = words.length > 0 || onlyDifferent.checked;
    let found = 0;
    for (const [element, name, rows, wasOpen] of steps) {
      let here = 0;
      for (const [row, content] of rows) {
        const shown =
          words.every((word) => (word.startsWith("step ") ? word === name : content.includes(word))) &&
          (!onlyDifferent.checked || row.classList.contains("differs"));
        row.hidden = !shown;
        here += shown;
      }
      element.hidden = here === 0;
      element.open = asked ? here > 0 : wasOpen;
      found += here;
    }
    search.querySelector("output").textContent = asked ? `${found} found` : "";
  };
  text.addEventListener("input", find);
  onlyDifferent.addEventListener("change", find);
  search.hidden = false;
}
