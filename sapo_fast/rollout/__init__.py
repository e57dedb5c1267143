"""Episodes of a language model in text environments: prompts, generation engines and the loop between them."""
