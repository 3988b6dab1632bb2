"""Use trained models: load a run or a model, generate, chat, evaluate, export."""
