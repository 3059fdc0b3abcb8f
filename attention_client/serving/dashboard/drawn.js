// Draws the output of `nodes.encode`. Text of members becomes text nodes and attribute values. Nothing is parsed
// as markup and no template is compiled: the page's policy forbids it.
import { h } from "vue";

const draw = (node) => (typeof node === "string" ? node : h(node[0], node[1], node[2].map(draw)));

export default {
  props: { drawing: String, tag: String },
  render() {
    return h(this.tag, JSON.parse(this.drawing).map(draw));
  },
};
