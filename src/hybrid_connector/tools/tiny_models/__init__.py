"""What makes up each family of tiny models: its `config.json` and its weights under Hugging Face names.

`recipe` says what can be chosen, `parts` holds layers several families share, and the other modules hold the
families by the kind of state they add to attention.
"""
