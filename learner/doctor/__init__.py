"""What keeps a run from beginning or going well, looked at without learning: the prompts, the way to the servers, the noise between both sides."""
