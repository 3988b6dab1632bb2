"""Try, measure and hand over what was trained: load a run or a model, generate, chat, evaluate, export."""
