// The phases of a request: the ledger's names, in the few colours of the picture.

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
  tokenize: "checked and tokenized",
  queue: "until workers were chosen",
  reserve: "until the decode worker promised blocks",
  fetch: "KV from another worker's prefix cache",
  prefill_queue: "until the prefill began",
  prefill: "prompt computed",
  return: "first token on its way to the router",
  handoff: "KV not yet at the decode worker",
  decode: "tokens streamed",
  emit: "first token handed to the client",
  failed_attempt: "lost with a worker",
  preempted: "given up for another tenant",
};

export const meaningOf = (phase) => MEANING[phase] ?? "";

export const nameOf = (phase) => phase.replaceAll("_", " ").replace("handoff", "hand-off");
