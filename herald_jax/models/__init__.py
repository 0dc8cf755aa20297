"""The networks: what turns tokens into queries, keys, values and logits."""
