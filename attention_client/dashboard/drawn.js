// Draws what `nodes.encode` has written. Text that members state becomes text nodes and attributes' values:
// nothing is parsed as markup, and no template is compiled, which the page's policy forbids.
import { h } from "vue";

const draw = (node) => (typeof node === "string" ? node : h(node[0], node[1], node[2].map(draw)));

export default {
  props: { drawing: String, tag: String },
  render() {
    return h(this.tag, JSON.parse(this.drawing).map(draw));
  },
};
