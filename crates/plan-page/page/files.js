// Where headers come from: files that were dropped, and addresses. Reads no more than headers.

const FIRST_READ = 1 << 20;
const LARGEST_READ = 1 << 29;
const LONGEST_JSON = 64 << 20;
const PART = /-(\d{5})-of-(\d{5})\.gguf$/;

/** A file of this machine. */
export function fromFile(file) {
  return {
    name: file.name,
    length: file.size,
    read: async (from, to) => new Uint8Array(await file.slice(from, to).arrayBuffer()),
  };
}

async function answered(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (failure) {
    throw new Error(`${address}: cannot be read. Its server must be there and allow other pages to read from it (CORS): ${failure.message}`);
  }
  if (response.status === 404 || response.ok) return response;
  throw new Error(`${address}: HTTP status ${response.status}`);
}

/** A file behind an address, read in ranges; null where there is none. */
async function fromAddress(address) {
  const headers = { Range: "bytes=0-7" };
  const response = await answered(address, { headers });
  if (response.status === 404) return null;
  let length = null;
  if (response.status === 206) {
    await response.arrayBuffer();
    // A server may keep this to itself; then the header of the file is believed.
    const range = response.headers.get("Content-Range");
    length = Number(range?.split("/")[1]) || null;
  } else {
    length = Number(response.headers.get("Content-Length")) || null;
    await response.body.cancel();
  }
  const read = async (from, to) => {
    const part = await answered(address, { headers: { Range: `bytes=${from}-${to - 1}` } });
    if (part.status === 206) return new Uint8Array(await part.arrayBuffer());
    return beginning(part, from, to);
  };
  return { name: new URL(address).pathname.split("/").pop(), length, read };
}

/** The bytes of a server that has no ranges: no more is taken in than is needed. */
async function beginning(response, from, to) {
  const taken = new Uint8Array(to);
  let n = 0;
  const reader = response.body.getReader();
  while (n < to) {
    const { done, value } = await reader.read();
    if (done) break;
    const part = value.subarray(0, to - n);
    taken.set(part, n);
    n += part.length;
  }
  await reader.cancel();
  return taken.subarray(from, n);
}

/** Opens what was dropped: a GGUF file or all its parts, or the files of a directory. */
export async function open(planner, sources, say) {
  const ggufs = sources.filter((source) => source.name.endsWith(".gguf"));
  if (ggufs.length > 0) return openGguf(planner, ggufs, say);
  const config = sources.find((source) => source.name === "config.json");
  if (config) return openDirectory(planner, "directory", sources, say);
  const tensors = sources.some((source) => source.name.endsWith(".safetensors"));
  if (tensors) throw new Error("a safetensors file has tensors, but no sizes: drop the directory's config.json, too");
  return openGguf(planner, sources, say);
}

async function openGguf(planner, sources, say) {
  for (let n = FIRST_READ; n <= LARGEST_READ; n *= 4) {
    say(`reading ${sources.map((source) => source.name).join(", ")}: the first ${n >> 20} MiB`);
    const parts = await Promise.all(sources.map((source) => source.read(0, Math.min(n, source.length ?? n))));
    const starts = sources.map((source, i) => ({ name: source.name, file_len: source.length, n_bytes: parts[i].length }));
    const opened = await asked(planner, { starts, parts });
    if (opened.start_too_short === undefined) return opened;
    if (parts.every((part, i) => part.length < n || part.length === sources[i].length)) break;
  }
  throw new Error("the header is longer than the bytes that are here: give more of the file");
}

/** A file that is shorter than its header says may be the beginning of one. */
async function asked(planner, { starts, parts }) {
  try {
    return await planner.ask({ gguf: { starts } }, parts);
  } catch (failure) {
    if (!failure.message.includes("truncated")) throw failure;
    const unknown = starts.map((start) => ({ ...start, file_len: null }));
    const opened = await planner.ask({ gguf: { starts: unknown } }, parts).catch(() => { throw failure; });
    return { ...opened, isBeginning: true };
  }
}

async function json(source) {
  if (!source) return null;
  if (source.length > LONGEST_JSON) throw new Error(`'${source.name}' has ${source.length} bytes: no JSON is so long`);
  const bytes = await source.read(0, source.length ?? LONGEST_JSON);
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch (failure) {
    throw new Error(`'${source.name}' is no JSON: ${failure.message}`);
  }
}

async function openDirectory(planner, name, sources, say) {
  const named = (wanted) => sources.find((source) => source.name === wanted);
  const config = await json(named("config.json"));
  const generation = await json(named("generation_config.json"));
  const index = await json(named("model.safetensors.index.json"));
  const wanted = index ? [...new Set(Object.values(index.weight_map ?? {}))].sort() : null;
  const files = wanted ? wanted.map(named) : sources.filter((source) => source.name.endsWith(".safetensors"));
  const missing = wanted?.filter((_, i) => !files[i]) ?? [];
  if (missing.length > 0) throw new Error(`the index names ${missing.length} files that are not here: add ${missing.join(", ")}`);
  if (files.length === 0) throw new Error("there is no safetensors file: add them, their headers are needed");
  const starts = [];
  const parts = [];
  for (const file of files) {
    say(`reading the header of ${file.name}`);
    const part = await safetensorsHeader(file);
    starts.push({ name: file.name, file_len: file.length, n_bytes: part.length });
    parts.push(part);
  }
  const question = { name, config, generation_config: generation, starts };
  return planner.ask({ directory: question }, parts);
}

async function safetensorsHeader(file) {
  const start = await file.read(0, 8);
  if (start.length < 8) throw new Error(`'${file.name}' has ${start.length} bytes: it is no safetensors file`);
  const length = new DataView(start.buffer, start.byteOffset).getBigUint64(0, true);
  if (length > 100_000_000n) throw new Error(`'${file.name}' has a header of ${length} bytes: it is no safetensors file`);
  return file.read(0, 8 + Number(length));
}

/** Opens a GGUF file or a directory by its address. */
export async function openAddress(planner, text, say) {
  const address = new URL(text.trim());
  const path = address.pathname.replace("/blob/", "/resolve/");
  address.pathname = path;
  if (path.endsWith(".gguf")) {
    const sources = await Promise.all(gguf_parts(address.href).map(fromAddress));
    const lost = sources.findIndex((source) => !source);
    if (lost >= 0) throw new Error(`${gguf_parts(address.href)[lost]}: there is no such file`);
    return openGguf(planner, sources, say);
  }
  let folder = path.replace(/\/[^/]+\.(json|safetensors)$/, "/");
  // A model's page on the Hub; its files are in a branch.
  if (address.hostname === "huggingface.co" && folder.split("/").filter(Boolean).length === 2) {
    folder = `${folder.replace(/\/$/, "")}/resolve/main/`;
  }
  folder = folder.replace("/tree/", "/resolve/");
  if (!folder.endsWith("/")) folder += "/";
  const at = (name) => new URL(folder + name, address.origin).href;
  say(`reading ${at("config.json")}`);
  const names = ["config.json", "generation_config.json", "model.safetensors.index.json"];
  const found = (await Promise.all(names.map((name) => fromAddress(at(name))))).filter(Boolean);
  if (!found.some((source) => source.name === "config.json")) throw new Error(`${at("config.json")}: there is no such file`);
  const index = await json(found.find((source) => source.name === names[2]));
  const files = index ? [...new Set(Object.values(index.weight_map ?? {}))] : ["model.safetensors"];
  const tensors = await Promise.all(files.map((name) => fromAddress(at(name))));
  const name = folder.split("/").filter((part) => part && part !== "resolve" && part !== "main").pop() ?? "directory";
  return openDirectory(planner, name, [...found, ...tensors.filter(Boolean)], say);
}

/** All parts of a split file, by the address of any. */
function gguf_parts(address) {
  const found = address.match(PART);
  if (!found) return [address];
  const part = (i) => address.replace(PART, `-${String(i + 1).padStart(5, "0")}-of-${found[2]}.gguf`);
  return Array.from({ length: Number(found[2]) }, (_, i) => part(i));
}
