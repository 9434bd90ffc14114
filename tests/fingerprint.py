"""The model that scripted servers and learners agree on. Imports no torch, so that intruders start quickly."""

from protocol.messages import ModelFingerprint

MODEL = ModelFingerprint(
    architecture="GPT2LMHeadModel", size="2 layers of width 64", vocab_size=32, tokenizer_hash="0123456789abcdef"
)
