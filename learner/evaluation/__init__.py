"""What is measured without learning: the noise between the two sides."""
