// All words of the page, in each of its languages. What is a function takes figures.

const en = {
  other: "中文",
  newChat: "New chat", chats: "Chats", untitled: "New chat", search: "Search chats", menu: "Chats",
  exportAll: "Export", importFile: "Import", exportOne: "Export this chat", rename: "Rename",
  remove: "Delete", removed: "Chat deleted.",
  undo: "Undo", dashboard: "Dashboard", docs: "API", model: "Model", settings: "Settings", close: "Close",
  welcome: "What is on your mind?",
  private: "Chats are kept in this browser, and nowhere else.",
  ideas: ["Explain why the sky is blue, in three sentences.", "Write a haiku about rain on a tin roof.",
    "Give me a table of the planets with their diameters."],
  placeholder: "Write a message", send: "Send", stop: "Stop", attach: "Add an image", detach: "Remove the image",
  hint: "Enter sends, Shift+Enter begins a line, Esc stops, ↑ edits your last message",
  you: "You", copy: "Copy", edit: "Edit", regenerate: "Another answer", goOn: "Continue", cancel: "Cancel",
  showTokens: "Tokens", hideTokens: "Text", previous: "Previous version", next: "Next version",
  thinking: "Thinking", thought: "Reasoning", call: "Calls", result: "Result", sendResults: "Send results",
  resultOf: (name) => `Result of ${name}`,
  waiting: "Waiting for the first token", bottom: "To the end",
  stopped: "Stopped.", interrupted: "The page was closed before the answer was complete.",
  length: "The answer reached its limit of tokens.",
  firstToken: (time) => `first token ${time}`, rate: (rate) => `${rate} tokens/s`,
  tokens: (count) => (count === 1 ? "1 token" : `${count} tokens`),
  cached: (share) => `${share} % cached`, details: "Timings and cache of this answer",
  ofPrompt: (cached, prompt) => `${cached} of ${prompt} tokens`,
  facts: { prompt: "Prompt", cached: "From the cache", why: "Why not more", output: "Answer", first: "First token",
    queue: "In the queue", prefill: "Prompt computed in", decode: "Answer computed in", drafts: "Drafts accepted",
    id: "Request" },
  ofDrafts: (accepted, drafts) => `${accepted} of ${drafts}`, copied: "Copied.",
  reasons: {},  // the server's words
  miss: ({ what }) => what,
  probability: (share) => `${share} %`,
  keyTitle: "This server needs an API key", keyNote: "It is kept for this tab only.", key: "API key",
  keyWrong: "The server does not know this key.", keySend: "Continue",
  noModel: "No model of this server writes text: see its API.",
  unreachable: "The server cannot be reached.", broken: "The connection ended before the answer was complete.",
  full: "The browser's storage is full: this chat is lost when the page is closed. Export it, or delete others.",
  badFile: "This file holds no chats.", badImage: "The browser cannot read this image.",
  imported: (count) => `${count} chats added.`,
  system: "System prompt", systemHint: "How the model should behave",
  sampling: "Sampling", modelsOwn: "model's own",
  temperature: "Temperature", top_p: "Top p", top_k: "Top k", min_p: "Min p", repetition_penalty: "Repetition penalty",
  max_tokens: "Most tokens", seed: "Seed", reasoning_effort: "Reasoning effort",
  probabilities: "Keep the probability of each token",
  tools: "Tools (JSON, as in OpenAI's API)", badTools: "This is not a JSON array.", reset: "Reset",
  scope: "They hold for this chat, and for the next ones you begin.",
};

const zh = {
  other: "English",
  newChat: "新对话", chats: "对话", untitled: "新对话", search: "搜索对话", menu: "对话列表",
  exportAll: "导出", importFile: "导入", exportOne: "导出此对话", rename: "重命名", remove: "删除", removed: "对话已删除。",
  undo: "撤销", dashboard: "仪表盘", docs: "API", model: "模型", settings: "设置", close: "关闭",
  welcome: "想聊点什么？",
  private: "对话只保存在这个浏览器中。",
  ideas: ["用三句话解释天空为什么是蓝色的。", "写一首关于雨的短诗。", "列一张太阳系行星直径的表格。"],
  placeholder: "输入消息", send: "发送", stop: "停止", attach: "添加图片", detach: "移除图片",
  hint: "Enter 发送，Shift+Enter 换行，Esc 停止，↑ 编辑上一条消息",
  you: "你", copy: "复制", edit: "编辑", regenerate: "重新生成", goOn: "继续", cancel: "取消",
  showTokens: "token", hideTokens: "文本", previous: "上一个版本", next: "下一个版本",
  thinking: "思考中", thought: "思考过程", call: "调用", result: "结果", sendResults: "发送结果",
  resultOf: (name) => `${name} 的结果`,
  waiting: "等待第一个 token", bottom: "回到底部",
  stopped: "已停止。", interrupted: "回答完成之前页面已关闭。",
  length: "回答达到了 token 数上限。",
  firstToken: (time) => `首个 token ${time}`, rate: (rate) => `${rate} token/秒`,
  tokens: (count) => `${count} 个 token`,
  cached: (share) => `缓存 ${share} %`, details: "此回答的用时与缓存",
  ofPrompt: (cached, prompt) => `${prompt} 个 token 中的 ${cached} 个`,
  facts: { prompt: "提示词", cached: "来自缓存", why: "未命中原因", output: "回答", first: "首个 token",
    queue: "排队", prefill: "提示词计算", decode: "回答计算", drafts: "接受的草稿", id: "请求" },
  ofDrafts: (accepted, drafts) => `${drafts} 个中的 ${accepted} 个`, copied: "已复制。",
  reasons: {
    "admission and tokenizing": "准入与分词", "the engine to see it": "等待引擎接收", "its turn": "排队等候",
    "token budget spent": "本步 token 预算已用完", "as many sequences run as max_num_seqs allows": "运行序列数已达 max_num_seqs",
    "not enough free blocks": "空闲块不足", "too few free blocks above the watermark": "水位线以上的空闲块不足",
    "can never be served": "无法满足", "as many adapters are in the batch as max_loras allows": "批次中的适配器已达 max_loras",
    "encoder budget or cache spent": "编码器预算或缓存已用完", "grammar not compiled yet": "语法尚未编译完成",
    "adapter not in memory (max_cpu_loras)": "适配器不在内存中（max_cpu_loras）", "waiting for more prompts to gather": "等待更多提示词",
    "as many prompts are mid-prefill as max_num_partial_prefills allows": "预填充中的提示词已达 max_num_partial_prefills",
    "one of its tokens is still in flight": "仍有 token 在计算中",
    "long_prefill_token_threshold": "long_prefill_token_threshold", "prefill_beside_decodes": "prefill_beside_decodes",
    "each pipeline stage decodes a share of the rows": "各流水线阶段分担解码",
  },
  miss: ({ kind, like, position, block, token, like_token: other, what }) => ({
    "differs": `从第 ${position} 个 token（第 ${block} 块）起与 ${like} 不同：此处为“${token}”，对方为“${other}”`,
    "continues": `从 ${like} 结束处（第 ${position} 个 token，第 ${block} 块）继续`,
    "other_media": `第 ${position} 个 token（第 ${block} 块）处的图像或声音与 ${like} 不同`,
    "not_kept": `前 ${position} 个 token 与 ${like} 相同，但部分块尚未计算完成，或已被其他内容占用`,
  }[kind] ?? what),
  probability: (share) => `${share} %`,
  keyTitle: "此服务器需要 API 密钥", keyNote: "密钥只保存在当前标签页中。", key: "API 密钥",
  keyWrong: "服务器不认识这个密钥。", keySend: "继续",
  noModel: "此服务器没有生成文本的模型：请参阅 API。",
  unreachable: "无法连接服务器。", broken: "回答完成之前连接已中断。",
  full: "浏览器存储空间已满：关闭页面后此对话将丢失。请导出它，或删除其他对话。",
  badFile: "此文件不包含对话。", badImage: "浏览器无法读取此图片。",
  imported: (count) => `已添加 ${count} 个对话。`,
  system: "系统提示词", systemHint: "模型应如何表现",
  sampling: "采样", modelsOwn: "模型默认",
  temperature: "温度", top_p: "Top p", top_k: "Top k", min_p: "Min p", repetition_penalty: "重复惩罚",
  max_tokens: "最大 token 数", seed: "随机种子", reasoning_effort: "思考强度",
  probabilities: "保留每个 token 的概率",
  tools: "工具（JSON，格式同 OpenAI API）", badTools: "这不是 JSON 数组。", reset: "重置",
  scope: "对此对话以及之后新建的对话有效。",
};

export const languages = { en, zh };

const CHOSEN = "pagoda-language";

export function getLanguage() {
  const chosen = localStorage.getItem(CHOSEN) ?? navigator.language;
  return chosen.startsWith("zh") ? "zh" : "en";
}

export function setLanguage(language) {
  try { localStorage.setItem(CHOSEN, language); } catch { /* full: for this visit only */ }
}
