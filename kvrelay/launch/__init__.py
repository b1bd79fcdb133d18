"""Workers as Ray actors. This is the only package that imports Ray. Ray places, starts, watches and
stops workers; it carries no requests.
"""

import os

# Ray reads this when it is imported. Without it, Ray would drop repeated lines of workers' logs.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
