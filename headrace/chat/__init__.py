"""Between text and tokens: tokenizers, chat templates, incremental text. Imports no torch."""
