"""One compute thread for every process of a test: the models are tiny, and threads that spin fight for the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
