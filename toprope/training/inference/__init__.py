"""The inference component: a policy behind the OpenAI dialect, every rollout a session."""
