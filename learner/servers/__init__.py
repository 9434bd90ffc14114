"""What is said to an inference server: the link, the pushes of weights, the check that both sides agree."""
