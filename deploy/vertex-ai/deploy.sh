#!/bin/sh
# Uploads a model that runs conch and deploys it to a new Vertex AI endpoint.
# Usage: deploy.sh NAME REGION IMAGE gs://BUCKET/REPOSITORY
set -eu
name=$1 region=$2 image=$3 repository=$4

gcloud ai models upload --region="$region" --display-name="$name" \
  --container-image-uri="$image" --artifact-uri="$repository" \
  --container-ports=8080 --container-health-route=/v2/health/ready --container-predict-route=/predict
gcloud ai endpoints create --region="$region" --display-name="$name"
endpoint=$(gcloud ai endpoints list --region="$region" --filter="displayName=$name" --format='value(name)')
model=$(gcloud ai models list --region="$region" --filter="displayName=$name" --format='value(name)')
gcloud ai endpoints deploy-model "$endpoint" --region="$region" --model="$model" \
  --display-name="$name" --machine-type=n1-standard-4 --traffic-split=0=100
# Requests are raw predictions, whose bodies are those of KServe v2:
#   gcloud ai endpoints raw-predict ENDPOINT --region=REGION --request=@request.json
