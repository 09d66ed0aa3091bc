// The server: requests with the key, its errors, its streams.

const KEY = "longspan.key"; // of this tab only: sessionStorage

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key.trim()),
};

const STREAM_OPTIONS = { include_usage: true, continuous_usage_stats: true };

/** What the server refused, or that it can't be reached (status 0). The message ends with the remedy. */
export class ApiError extends Error {
  constructor(message, { status = 0, type = "", param = null } = {}) {
    super(message);
    Object.assign(this, { status, type, param });
  }
}

export async function modelNames() {
  const response = await request("v1/models");
  return (await response.json()).data.map((model) => model.id);
}

/** The metrics in the text exposition format. */
export async function metricsText(signal) {
  return (await request("metrics", { signal })).text();
}

/** The chunks of a streamed chat. Throws ApiError, or what `signal` was aborted with. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: STREAM_OPTIONS }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reachable(reader.read());
      if (done) throw new ApiError("The connection ended before the answer did. Try again.");
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        if (event === "data: [DONE]") return;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw refusal(chunk.error, chunk.error.code);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  // A header carries bytes, so a key beyond ASCII goes as UTF-8.
  const key = String.fromCharCode(...new TextEncoder().encode(apiKey.get()));
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await reachable(fetch(path, { ...options, headers }));
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw refusal(body.error ?? { message: response.statusText }, response.status);
}

const refusal = ({ message, type, param }, status) => new ApiError(message, { status, type, param });

/** The result of `work`; a failure of the network as an ApiError. */
async function reachable(work) {
  try {
    return await work;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached. See whether it still runs, then try again.");
  }
}
