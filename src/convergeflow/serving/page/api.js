// The server, as the page talks to it. A token, if one is needed, stays in this tab.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const token = sessionStorage.getItem("token");
  return { "content-type": "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status must do */ }
  throw new Refused(response.status, message);
}

export async function ask(path, body, signal) {
  const response = await fetch(path, { method: body ? "POST" : "GET", headers: headers(), body: body && JSON.stringify(body), signal });
  return (await checked(response)).json();
}

export async function* streamed(body, signal) {
  // The chunks of a completion, one by one.
  const sent = JSON.stringify({ ...body, stream: true });
  const response = await checked(await fetch("/v1/completions", { method: "POST", headers: headers(), body: sent, signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(500, chunk.error.message);
      yield chunk;
    }
  }
}
