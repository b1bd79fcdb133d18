// The phases of a request: the names of the ledger, grouped into a few colours.

export const KINDS = [
  ["queue", "queue"],
  ["prefill", "prefill"],
  ["handoff", "hand-off"],
  ["decode", "decode"],
  ["failed", "failed attempt"],
];

const KIND = {
  tokenize: "queue",
  queue: "queue",
  reserve: "queue",
  prefill_queue: "queue",
  fetch: "handoff",
  prefill: "prefill",
  return: "prefill",
  handoff: "handoff",
  decode: "decode",
  emit: "decode",
  failed_attempt: "failed",
  preempted: "queue",
};

export const kindOf = (phase) => KIND[phase] ?? "queue";

const MEANING = {
  tokenize: "request checked and tokenized",
  queue: "wait for workers",
  reserve: "wait for blocks on the decode worker",
  fetch: "KV from another worker's prefix cache",
  prefill_queue: "wait for the prefill to begin",
  prefill: "prompt computed",
  return: "first token on its way to the router",
  handoff: "wait for the KV on the decode worker",
  decode: "tokens streamed",
  emit: "first token handed to the client",
  failed_attempt: "lost with a failed worker",
  preempted: "batch slot given to another tenant",
};

export const meaningOf = (phase) => MEANING[phase] ?? "";

export const nameOf = (phase) => phase.replaceAll("_", " ").replace("handoff", "hand-off");
