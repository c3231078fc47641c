"""Two replicas of conch behind Ray Serve's gRPC proxy, until Ctrl-C.

python serve_models.py ../models/basic
"""

import sys
from pathlib import Path

from ray import serve
from ray.serve.config import gRPCOptions

from conch_ray import ConchDeployment

SERVICER = "conch_ray.add_GRPCInferenceServiceServicer_to_server"


def main() -> None:
    repository = Path(sys.argv[1]).resolve()
    serve.start(grpc_options=gRPCOptions(port=9000, grpc_servicer_functions=[SERVICER]))
    application = ConchDeployment.options(num_replicas=2).bind(
        str(repository),
        model_control_mode="explicit",
        load_model=["simple", "add_sub_python", "digits", "word_chain"],
    )
    serve.run(application, blocking=True)


if __name__ == "__main__":
    main()
