// The TypeScript clients against a built dllm-mcp. Both check results against the output schema, errors included.
//
// usage: node client.mjs sdk|client PROGRAM   (in a folder where the packages are installed)
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [kind, program] = process.argv.slice(2);
// Packages are looked for in the folder where the script was started, not where it lies.
const resolve = createRequire(join(process.cwd(), "x.js")).resolve;
const load = (name) => import(pathToFileURL(resolve(name)).href);
const names = kind === "sdk"
  ? ["@modelcontextprotocol/sdk/client/index.js", "@modelcontextprotocol/sdk/client/stdio.js"]
  : ["@modelcontextprotocol/client", "@modelcontextprotocol/client/stdio"];
const { Client } = await load(names[0]);
const { StdioClientTransport } = await load(names[1]);

let passed = 0;
let failed = 0;
const check = (name, good, detail) => {
  if (good) passed += 1;
  else {
    failed += 1;
    console.log(`FAILED ${name}: ${JSON.stringify(detail)}`);
  }
};

const state = mkdtempSync(join(tmpdir(), "dllm mcp ä "));
mkdirSync(join(state, "files"));
const client = new Client({ name: "acceptance", version: "1" });
await client.connect(new StdioClientTransport({ command: program, args: ["--state-dir", state, "--threads", "1"], stderr: "ignore" }));

const call = async (name, args, options = {}) => {
  const params = { name, arguments: args };
  const result = kind === "sdk" ? await client.callTool(params, undefined, options) : await client.callTool(params, options);
  return result.structuredContent;
};

const { tools } = await client.listTools();
check("list", tools.length === 8, tools);
const answer = await call("dllm_generate", { prompt: "86 + 45 =", seed: 1, max_tokens: 32 });
check("generate", answer.data.text === "131", answer);
for (const [tool, args, type] of [
  ["dllm_generate", { prompt: "p", max_tokens: 0 }, "bad_argument"],
  ["dllm_generate", { prompt: "p", stream: true }, "wrong_server"],
  ["dllm_batch", { input_path: "../x" }, "path_refused"],
  ["dllm_job", { operation: "get", job_id: "x" }, "unknown_job"],
  ["dllm_models", { operation: "load", model: "x" }, "load_failed"],
]) {
  const error = await call(tool, args);
  check(`error ${type}`, error.error.type === type, error);
}
const notes = [];
const rows = Array.from({ length: 32 }, (_, i) => ({ id: i, prompt: `${i + 10} + 5 =` }));
await call("dllm_batch", { items_json: JSON.stringify(rows), max_tokens: 64, wait_s: 20 }, { onprogress: (note) => notes.push(note.progress) });
check("progress", notes.length > 0 && notes.every((note, i) => i === 0 || note > notes[i - 1]), notes);

const job = (await call("dllm_generate", { prompt: "7 + 8 =", seed: 1, max_tokens: 32, wait_s: 0 })).data.job_id;
const waited = await call("dllm_job", { operation: "wait", job_id: job });
check("job", waited.data.text === "15", waited);

writeFileSync(join(state, "files/in.jsonl"), rows.map((row) => `${JSON.stringify({ id: `r${row.id}`, a: row.id })}\n`).join(""));
let batch = await call("dllm_batch", { input_path: "in.jsonl", output_path: "out.jsonl", template: "{{a}} + 7 =", max_tokens: 16, wait_s: 20 });
while (["queued", "running"].includes(batch.data.state)) {
  batch = await call("dllm_job", { operation: "wait", job_id: batch.data.job_id });
}
const lines = readFileSync(join(state, "files/out.jsonl"), "utf8").trim().split("\n").map((line) => JSON.parse(line));
check("batch file", lines.length === 32 && lines.every((line) => line.ok), batch);

const abort = new AbortController();
// Steps at this temperature are never confident, so it runs until it is cancelled.
const endless = { prompt: "Tell a story", max_tokens: 4096, max_steps: 4096, t_min: 10, t_max: 10, n: 4, wait_s: 25 };
const jobs = async () => (await call("dllm_job", { operation: "list" })).data.jobs;
const before = (await jobs()).length;
const long = call("dllm_generate", endless, { signal: abort.signal }).then(() => "answered", () => "aborted");
let newest;
do [newest] = await jobs(); while ((await jobs()).length === before || newest.state !== "running");
abort.abort();
check("cancel, the caller's side", (await long) === "aborted", "it was answered");
const ended = await call("dllm_job", { operation: "wait", job_id: newest.job_id });
check("cancel, the server's side", ended.error?.type === "cancelled", ended);
const status = await call("dllm_status", {});
check("the next call after a cancel", status.success === true, status);

await client.close();
rmSync(state, { recursive: true, force: true });
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed === 0 ? 0 : 1);
