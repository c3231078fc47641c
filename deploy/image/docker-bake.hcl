# The tags of the image, by the extras that they have: `make image TAGS="slim onnx"`.
variable "REPOSITORY" {
  default = "conch"
}

variable "STORES" {
  default = "s3,gcs,azure,opentelemetry,cache,redis"
}

group "default" {
  targets = ["slim", "onnx"]
}

target "image" {
  dockerfile = "deploy/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
}

# Python models and object stores; no engine.
target "slim" {
  inherits = ["image"]
  tags     = ["${REPOSITORY}:slim"]
  args     = { EXTRAS = STORES }
}

target "onnx" {
  inherits = ["image"]
  tags     = ["${REPOSITORY}:onnx"]
  args     = { EXTRAS = "onnxruntime,${STORES}" }
}

target "openvino" {
  inherits = ["image"]
  tags     = ["${REPOSITORY}:openvino"]
  args     = { EXTRAS = "openvino,${STORES}" }
}

target "trees" {
  inherits = ["image"]
  tags     = ["${REPOSITORY}:trees"]
  args     = { EXTRAS = "trees,${STORES}" }
}

# CUDA comes with the packages; the driver with the node.
target "gpu" {
  inherits  = ["image"]
  platforms = ["linux/amd64"]
  tags      = ["${REPOSITORY}:gpu"]
  args      = { EXTRAS = "torch,tensorrt,${STORES}" }
}
