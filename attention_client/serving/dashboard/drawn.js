// Draws the output of `nodes.encode`. Text of members becomes text nodes and attribute values. Nothing is parsed
// as markup and no template is compiled: the page's policy forbids it.
import { h } from "vue";

export default {
  props: { drawing: String, tag: String },
  render() {
    // A viewer's own elements, such as the buttons of a row, go where the drawing names their member.
    const own = this.$slots.default?.() ?? [];
    const draw = (node) => {
      if (typeof node === "string") return node;
      const [tag, attributes, children] = node;
      const member = attributes["data-member"];
      if (tag === "slot") return own.find((element) => element.props["data-member"] === member);
      return h(tag, attributes, children.map(draw));
    };
    return h(this.tag, JSON.parse(this.drawing).map(draw));
  },
};
