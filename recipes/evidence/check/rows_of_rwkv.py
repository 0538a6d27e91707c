"""RWKV: rows of a batch are mixed when a cache is continued.

The last hidden state has no axis of tokens, so that shifting it makes (rows, rows, width) of (rows, 1, width). Right are logits
of the shape (2, 1, 97). Exits with 1 while the fault is there.
"""

from plain import ids, judge, make

CELLS = {"cache, token by token": ("rwkv",), "right padding": ("rwkv",)}

if __name__ == "__main__":
    model, text = make("rwkv"), ids(2, 21)
    state = model(input_ids=text[:, :20], use_cache=True).state
    shape = tuple(model(input_ids=text[:, 20:], state=state, use_cache=True).logits.shape)
    judge("", {} if shape == (2, 1, 97) else {"rwkv": f"logits of one token in each of 2 rows have the shape {shape}"})
