"""A vision-language model that says what went wrong in an episode, when, why, and what to do."""
