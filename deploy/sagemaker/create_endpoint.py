"""Creates a SageMaker endpoint that runs conch, of one model or of many that are loaded when they are called.

Needs boto3, a role that SageMaker can assume, the image in a registry, and models in S3: for one model a
``model.tar.gz`` with its directory in it; for many a prefix with such archives.
"""

from __future__ import annotations

import argparse

import boto3


def main() -> None:
    """Creates model, configuration and endpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--image", required=True, help="URI of the image in ECR")
    parser.add_argument("--role", required=True, help="ARN of the execution role")
    parser.add_argument("--data", required=True, help="s3:// URI of the archive, or of the prefix")
    parser.add_argument("--multi-model", action="store_true")
    parser.add_argument("--default-model", help="directory of the model in an archive with several")
    parser.add_argument("--instance-type", default="ml.c6i.xlarge")
    given = parser.parse_args()

    environment = {}
    if given.default_model:
        environment["SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"] = given.default_model
    client = boto3.client("sagemaker")
    client.create_model(
        ModelName=given.name,
        ExecutionRoleArn=given.role,
        PrimaryContainer={
            "Image": given.image,
            "Mode": "MultiModel" if given.multi_model else "SingleModel",
            "ModelDataUrl": given.data,
            "Environment": environment,
        },
    )
    client.create_endpoint_config(
        EndpointConfigName=given.name,
        ProductionVariants=[
            {
                "VariantName": "all",
                "ModelName": given.name,
                "InstanceType": given.instance_type,
                "InitialInstanceCount": 1,
                "ContainerStartupHealthCheckTimeoutInSeconds": 600,
            }
        ],
    )
    client.create_endpoint(EndpointName=given.name, EndpointConfigName=given.name)
    print(f"endpoint {given.name} is being created")


if __name__ == "__main__":
    main()
