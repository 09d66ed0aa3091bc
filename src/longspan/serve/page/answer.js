// One answer as it comes: chunks of a stream are added to a message, and what is known of it to its `meta`.

export class Answer {
  /** Fills `message`, an assistant's. */
  constructor(message) {
    this.message = message;
    this.asked = performance.now();
    this.first = this.last = null; // when the first and the last piece came
  }

  add(chunk) {
    const { message } = this;
    const { meta } = message;
    if (chunk.usage) addUsage(meta, chunk.usage);
    const [choice] = chunk.choices;
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content || reasoning || calls) this.#mark(meta);
    if (reasoning) {
      message.reasoning_content += reasoning;
      meta.thinkSeconds = (this.last - this.first) / 1000;
    }
    if (content) message.content += content;
    for (const call of calls ?? []) this.#addCall(call);
    if (choice.finish_reason) meta.finish = choice.finish_reason;
  }

  #mark(meta) {
    this.last = performance.now();
    this.first ??= this.last;
    meta.ttft = (this.first - this.asked) / 1000;
    // The first token is the prompt's doing; the others came in the time since.
    const others = (meta.output ?? 0) - 1;
    if (others > 0 && this.last > this.first) meta.speed = (others * 1000) / (this.last - this.first);
  }

  #addCall(piece) {
    const calls = this.message.tool_calls;
    calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    const call = calls[piece.index];
    if (piece.id) call.id = piece.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
}

function addUsage(meta, usage) {
  meta.prompt = usage.prompt_tokens;
  meta.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  meta.output = usage.completion_tokens;
  meta.reasoning = usage.completion_tokens_details?.reasoning_tokens ?? 0;
}
