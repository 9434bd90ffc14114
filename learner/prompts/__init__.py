"""What is asked: from data to `Prompt`, and which prompt comes next."""
