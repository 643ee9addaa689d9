"""What the server process imports once, from which all workers and replicas are forked: they then start in no time.

The trainer and the collectors too: a worker imports the user's script, which will ask for them.
"""

import gc
import signal

# Ctrl-C meanwhile ends the server without a traceback, which would stand among what the trainer says
_before = signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    import vla_async.collectors.env_worker
    import vla_async.collectors.replica_process
    import vla_async.collectors.streaming
    import vla_async.collectors.worker
    import vla_async.envs
    import vla_async.policies
    import vla_async.trainer  # noqa: F401
finally:
    signal.signal(signal.SIGINT, _before)

# what is imported stays for good: a collection in a worker would only copy the pages that it looks at
gc.collect()
gc.freeze()
