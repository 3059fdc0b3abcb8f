// A button. If it asks for confirmation, the first press turns it into a question for some seconds, in the same
// place and size; a second press confirms. A double click counts as one press.
import { h } from "vue";

const DOUBLE_CLICK_MS = 400;
const ASKING_MS = 5000;

export default {
  props: {
    verb: String,
    subject: String,
    kind: String,
    asks: Boolean,
    disabled: Boolean,
    token: Number,
  },
  emits: ["press"],
  data() {
    return { asking: false };
  },
  // A change of the subject withdraws the question.
  watch: { verb: "withdraw", token: "withdraw", disabled: "withdraw" },
  created() {
    this.pressedAt = -Infinity;
  },
  beforeUnmount() {
    this.withdraw();
  },
  methods: {
    press(event) {
      const doubled = event.detail > 1 || event.timeStamp - this.pressedAt < DOUBLE_CLICK_MS;
      this.pressedAt = event.timeStamp;
      if (doubled || this.disabled) return;
      if (this.asks && !this.asking) {
        this.asking = true;
        this.timer = setTimeout(this.withdraw, ASKING_MS);
        return;
      }
      this.withdraw();
      this.$emit("press", this.token ?? null);
    },
    withdraw() {
      clearTimeout(this.timer);
      this.asking = false;
    },
  },
  render() {
    const mark = this.asking ? "?" : "";
    const name = [this.verb, this.subject].filter(Boolean).join(" ");
    const content = [h("span", this.verb)];
    // The mark's space is always reserved, so the button keeps its size.
    if (this.asks) content.push(h("span", { class: "mark" }, mark));
    return h(
      "button",
      {
        type: "button",
        class: ["press", this.kind, { asking: this.asking }],
        // Not `disabled`: the button keeps the focus and stays readable.
        "aria-disabled": String(this.disabled),
        title: this.subject ? name : undefined,
        "aria-label": name + mark,
        "aria-description": this.asking ? "Press again to confirm" : undefined,
        onClick: this.press,
      },
      content,
    );
  },
};
