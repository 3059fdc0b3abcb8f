// A part of the page with a heading. A foldable part starts folded on a narrow screen.
import { h } from "vue";

const NARROW = "(max-width: 620px)";

export default {
  props: { name: String, title: String, size: String, folds: Boolean },
  data() {
    return { open: !(this.folds && matchMedia(NARROW).matches) };
  },
  render() {
    const [title, body] = [`${this.name}-title`, `${this.name}-body`];
    const fold = () =>
      h(
        "button",
        {
          type: "button",
          class: "fold",
          "aria-expanded": String(this.open),
          "aria-controls": body,
          onClick: () => (this.open = !this.open),
        },
        this.title,
      );
    return h("section", { class: ["card", this.size], "aria-labelledby": title }, [
      h("h2", { id: title }, this.folds ? [fold()] : this.title),
      h("div", { id: body, hidden: !this.open }, this.$slots.default?.()),
    ]);
  },
};
