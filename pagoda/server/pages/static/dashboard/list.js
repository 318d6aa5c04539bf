// A list of any length: only the rows in sight are elements.

const ROW = 28;
const MORE = 5;

export class VirtualList {
  // fill(element, item): write an item into a row.   open(item): it was clicked, or chosen by Enter.
  constructor(list, space, fill, open) {
    Object.assign(this, { list, space, fill, open, items: [], at: -1, rows: [] });
    list.addEventListener("scroll", () => this.draw(), { passive: true });
    list.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.draw()).observe(list);
  }

  set(items) {
    const chosen = this.items[this.at]?.id;
    this.items = items;
    this.at = chosen === undefined ? -1 : items.findIndex((item) => item.id === chosen);
    this.space.style.height = `${items.length * ROW}px`;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - MORE);
    const count = Math.min(this.items.length - first, Math.ceil(this.list.clientHeight / ROW) + 2 * MORE);
    while (this.rows.length < count) this.rows.push(this.#make());
    this.rows.forEach((row, index) => {
      row.hidden = index >= count;
      if (row.hidden) return;
      const at = first + index;
      row.dataset.at = at;
      row.id = `row-${at}`;
      row.style.top = `${at * ROW}px`;
      row.setAttribute("aria-selected", at === this.at);
      row.setAttribute("aria-setsize", this.items.length);
      row.setAttribute("aria-posinset", at + 1);
      this.fill(row, this.items[at]);
    });
    if (this.at >= 0) this.list.setAttribute("aria-activedescendant", `row-${this.at}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #make() {
    const row = document.createElement("div");
    row.className = "row";
    row.setAttribute("role", "option");
    row.addEventListener("click", () => { this.#choose(Number(row.dataset.at)); this.open(this.items[this.at]); });
    this.space.append(row);
    return row;
  }

  #choose(at) {
    this.at = Math.max(0, Math.min(this.items.length - 1, at));
    const top = this.at * ROW, { scrollTop, clientHeight } = this.list;
    if (top < scrollTop) this.list.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.list.scrollTop = top + ROW - clientHeight;
    this.draw();
  }

  #press(event) {
    const page = Math.floor(this.list.clientHeight / ROW);
    const to = { ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page,
      Home: 0, End: this.items.length - 1 }[event.key];
    if (!this.items.length || (to === undefined && event.key !== "Enter")) return;
    event.preventDefault();
    if (to !== undefined) this.#choose(to);
    else if (this.at >= 0) this.open(this.items[this.at]);
  }
}
