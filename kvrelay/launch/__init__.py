"""Workers as Ray actors. The only package that knows Ray, which places, starts, watches and stops
workers and carries no request.
"""

import os

# Read when Ray is imported: lines of workers' logs that are alike count
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
