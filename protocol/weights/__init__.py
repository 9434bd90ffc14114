"""The bytes of a push: how weights are cut, sent, checked, received; sender beside receiver. Imports torch."""
