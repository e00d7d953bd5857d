// The AI SDK with five providers, as they come from their registry, against the server at $ADDRESS. Run by
// test_node.py.
const assert = require("node:assert/strict");
const { test } = require("node:test");
const { generateObject, generateText, streamText, tool } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createDeepSeek } = require("@ai-sdk/deepseek");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOllama } = require("ollama-ai-provider-v2");
const { z } = require("zod");

const address = process.env.ADDRESS;
const baseURL = `${address}/v1`;
const apiKey = "none";
const openai = createOpenAI({ baseURL, apiKey });
const compatible = { name: "cellar", baseURL, apiKey, supportsStructuredOutputs: true };
const models = {
  openai: openai.chat("stories"),
  responses: openai.responses("stories"),
  compatible: createOpenAICompatible(compatible)("stories"),
  anthropic: createAnthropic({ baseURL, apiKey })("stories"),
  deepseek: createDeepSeek({ baseURL, apiKey })("stories"),
  ollama: createOllama({ baseURL: `${address}/api` })("stories"),
};
const digit = z.number().int().min(1).max(9);
const inputSchema = z.object({ city: z.enum(["Rome", "Oslo"]), days: digit.optional() });
const tools = { weather: tool({ description: "The weather.", inputSchema }) };

// What JSON schemas say in unusual ways: propertyNames, const, format, oneOf or anyOf.
const schema = z.object({
  born: z.iso.date(),
  ages: z.record(z.enum(["Tom", "Lily"]), digit),
  pet: z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("cat"), lives: digit }),
    z.object({ kind: z.literal("dog"), mood: z.enum(["sad", "happy"]) }),
  ]),
  note: z.enum(["none"]).nullable(),
});
const names = z.object({ ages: z.record(z.string(), digit) });

for (const [name, model] of Object.entries(models)) {
  // The provider for Ollama sends both settings in places that Ollama does not know, but these.
  const limited = (n) => ({
    model, temperature: 0, maxRetries: 0, maxOutputTokens: n,
    providerOptions: { ollama: { options: { num_predict: n, temperature: 0 } } },
  });

  test(`${name}: a chat whole and streamed`, async () => {
    const chat = { ...limited(16), prompt: "Once upon a time" };
    const whole = await generateText(chat);
    assert.equal(whole.usage.outputTokens, 16);
    let text = "";
    for await (const part of streamText(chat).textStream) text += part;
    assert.equal(text, whole.text);
    assert.notEqual(text, "");
  });

  test(`${name}: tools`, async () => {
    const prompt = "How is it?";
    assert.notEqual((await generateText({ ...limited(16), prompt, tools })).text, "");
    if (name === "ollama") return; // Its API has no choice of tools.
    const asked = { ...limited(100), prompt, tools, toolChoice: "required" };
    const [call] = (await generateText(asked)).toolCalls;
    assert.match(call.input.city, /Rome|Oslo/);
    assert.deepEqual((await streamText(asked).toolCalls)[0].input, call.input);
    const { toolCallId, toolName, input } = call;
    const output = { type: "text", value: "sunny" };
    const messages = [
      { role: "user", content: prompt },
      { role: "assistant", content: [{ type: "tool-call", toolCallId, toolName, input }] },
      { role: "tool", content: [{ type: "tool-result", toolCallId, toolName, output }] },
    ];
    assert.equal((await generateText({ ...limited(8), messages, tools })).usage.outputTokens, 8);
  });

  if (name === "deepseek") continue; // It has JSON without schemas.
  test(`${name}: a typed object`, async () => {
    const typed = await generateObject({ ...limited(300), schema, prompt: "A child" });
    assert.match(typed.object.born, /^\d{4}-\d\d-\d\d$/);
    if (name === "anthropic") return; // It asks for a call, and shows nothing of one that is cut off.
    // How many names there are is up to the model: this one may be cut off.
    const record = generateObject({ ...limited(40), schema: names, prompt: "Ages" });
    const text = await record.then(({ object }) => JSON.stringify(object), (error) => error.text);
    assert.match(text, /^\s*\{\s*"ages"\s*:\s*\{/);
  });
}
