"""The headers in which an answer of the server's OpenAI side names the versions of the policy that sampled it.

inference_server/answer_versions.py writes them, learner/evaluation reads them: the oldest token's, and the newest's.
"""

NO_VERSION = -1
"""What the model's own weights are called, before a learner has pushed, as in /metrics."""
START, END = "X-Slipstream-Policy-Version-Start", "X-Slipstream-Policy-Version-End"
