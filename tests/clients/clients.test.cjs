// The clients of OpenAI, Anthropic and Ollama for JavaScript, as they come from their registry, against
// the servers at $ADDRESS and $ENCODER. Run by test_node.py.
const assert = require("node:assert/strict");
const { test } = require("node:test");
const { default: OpenAI } = require("openai");
const { default: Anthropic } = require("@anthropic-ai/sdk");
const { Ollama } = require("ollama");

const address = process.env.ADDRESS;
const openai = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const ollama = new Ollama({ host: address });
const messages = [{ role: "user", content: "Once upon a time" }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

test("openai: a chat whole and streamed", async () => {
  const options = { model: "stories", messages, temperature: 0, max_tokens: 16 };
  const whole = await openai.chat.completions.create(options);
  const stream = await openai.chat.completions.create({ ...options, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(whole.usage.completion_tokens, 16);
});

async function running() {
  const text = await (await fetch(`${address}/metrics`)).text();
  const line = text.split("\n").find((line) => line.startsWith("cellar_requests_running{"));
  return Number(line.split(" ").pop());
}

test("openai: a stream that is cancelled frees its place", async () => {
  const options = { model: "stories", messages, max_tokens: 4000, stream: true };
  const stream = await openai.chat.completions.create(options);
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) break;
  }
  stream.controller.abort();
  const until = Date.now() + 60000;
  while ((await running()) > 0) {
    assert.ok(Date.now() < until);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
});

test("openai: vectors", async () => {
  const encoder = new OpenAI({ baseURL: `${process.env.ENCODER}/v1`, apiKey: "none", maxRetries: 0 });
  const input = ["How is it?", "It is raining."];
  const { data } = await encoder.embeddings.create({ model: "bert_tiny", input });
  assert.equal(data.length, 2);
  assert.equal(data[0].embedding.length, data[1].embedding.length);
  assert.notDeepEqual(data[0].embedding, data[1].embedding);
});

test("openai: a response whole and streamed", async () => {
  const options = { model: "stories", input: "One day", temperature: 0, max_output_tokens: 16 };
  const whole = await openai.responses.create(options);
  const stream = openai.responses.stream(options);
  let text = "";
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  assert.equal((await stream.finalResponse()).usage.output_tokens, 16);
});

test("openai: a call of a tool, an object of a schema, an error", async () => {
  const tool = { type: "function", function: { name: "weather", parameters } };
  const answer = await openai.chat.completions.create({
    model: "stories", messages, tools: [tool], tool_choice: "required",
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.match(JSON.parse(call.function.arguments).city, /Rome|Oslo/);
  const json_schema = { name: "place", strict: true, schema: parameters };
  const typed = await openai.chat.completions.parse({
    model: "stories", messages, response_format: { type: "json_schema", json_schema },
  });
  assert.match(typed.choices[0].message.parsed.city, /Rome|Oslo/);
  const wrong = openai.models.retrieve("gpt-4");
  await assert.rejects(wrong, OpenAI.NotFoundError);
});

test("anthropic: a message whole and streamed, a call of a tool, an error", async () => {
  const options = { model: "stories", messages, max_tokens: 16, temperature: 0 };
  const whole = await anthropic.messages.create(options);
  const last = await anthropic.messages.stream(options).finalMessage();
  assert.deepEqual(last.content, whole.content);
  const called = await anthropic.messages.create({
    ...options,
    max_tokens: 100,
    tools: [{ name: "weather", input_schema: parameters }],
    tool_choice: { type: "any" },
  });
  assert.match(called.content.find((part) => part.type === "tool_use").input.city, /Rome|Oslo/);
  const format = { type: "json_schema", schema: parameters };
  const typed = await anthropic.messages.create({
    ...options, max_tokens: 60, output_config: { format },
  });
  assert.match(JSON.parse(typed.content[0].text).city, /Rome|Oslo/);
  const wrong = anthropic.models.retrieve("claude");
  await assert.rejects(wrong, Anthropic.NotFoundError);
});

test("ollama: a chat whole and streamed, an object of a schema, an error", async () => {
  const options = { model: "stories", messages, options: { temperature: 0, num_predict: 16 } };
  const whole = await ollama.chat(options);
  let text = "";
  for await (const line of await ollama.chat({ ...options, stream: true })) {
    text += line.message.content;
  }
  assert.equal(text, whole.message.content);
  const typed = await ollama.chat({ model: "stories", messages, format: parameters });
  assert.match(JSON.parse(typed.message.content).city, /Rome|Oslo/);
  await assert.rejects(ollama.show({ model: "llama3" }), { status_code: 404 });
});
