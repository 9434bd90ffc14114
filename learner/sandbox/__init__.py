"""Run user code in killable processes: rewards, environments, tools and agents."""
