"""Try and measure what was trained: load a run or a model, generate, chat, evaluate."""
