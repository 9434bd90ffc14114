"""What answers the policy between its turns, and the exact tokens that come of it: an episode's branches."""
