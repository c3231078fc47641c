//! A client of conch in Rust: unary and streamed inference, model control, TLS and shared memory.

use std::collections::HashMap;
use std::error::Error;
use std::fs::OpenOptions;
use std::process::ExitCode;
use std::time::Duration;

use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::Status;

use inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use inference::infer_parameter::ParameterChoice;
use inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use inference::{InferParameter, ModelInferRequest};

#[allow(clippy::all, dead_code)]
mod inference {
    tonic::include_proto!("inference");
}

const USAGE: &str = "usage: client [--address HOST:PORT] [--root-cert FILE] \
                     unary | stream | load MODEL | unload MODEL | shared-memory";
const COUNT: usize = 16; // elements of each tensor of the model `simple`
const BYTES: usize = 4 * COUNT;

type Client = GrpcInferenceServiceClient<Channel>;
type Outcome = Result<(), Box<dyn Error>>;

/// Sends one request and prints the sum of its two vectors.
async fn unary(conch: &mut Client) -> Outcome {
    let request = ModelInferRequest {
        model_name: "simple".into(),
        inputs: inputs(),
        raw_input_contents: vectors(),
        ..Default::default()
    };
    let response = conch.model_infer(request).await?.into_inner();
    for (output, raw) in response.outputs.iter().zip(&response.raw_output_contents) {
        if output.name == "OUTPUT0" {
            println!("unary: {}", numbers(raw));
        }
    }
    Ok(())
}

/// Has a decoupled model write text, and prints each word as it comes.
async fn stream(conch: &mut Client) -> Outcome {
    let prompt = "A";
    let mut text = (prompt.len() as u32).to_le_bytes().to_vec();
    text.extend(prompt.as_bytes());
    let request = ModelInferRequest {
        model_name: "word_chain".into(),
        inputs: vec![
            input("prompt", "BYTES", &[1]),
            input("max_words", "INT32", &[1]),
        ],
        raw_input_contents: vec![text, raw(&[5])],
        ..Default::default()
    };
    // The server ends the stream after the last response, as there are no more requests.
    let mut responses = conch
        .model_stream_infer(tokio_stream::once(request))
        .await?
        .into_inner();
    while let Some(message) = responses.message().await? {
        if !message.error_message.is_empty() {
            return Err(message.error_message.into());
        }
        if let Some(response) = message.infer_response {
            println!(
                "stream: {}",
                String::from_utf8_lossy(&response.raw_output_contents[0][4..])
            );
        }
    }
    Ok(())
}

/// Loads a model, or loads it again.
async fn load(conch: &mut Client, model: &str) -> Outcome {
    let request = inference::RepositoryModelLoadRequest {
        model_name: model.into(),
        ..Default::default()
    };
    conch.repository_model_load(request).await?;
    print_ready(conch, "load", model).await
}

/// Unloads a model.
async fn unload(conch: &mut Client, model: &str) -> Outcome {
    let request = inference::RepositoryModelUnloadRequest {
        model_name: model.into(),
        ..Default::default()
    };
    conch.repository_model_unload(request).await?;
    print_ready(conch, "unload", model).await
}

async fn print_ready(conch: &mut Client, command: &str, model: &str) -> Outcome {
    let request = inference::ModelReadyRequest {
        name: model.into(),
        ..Default::default()
    };
    let ready = conch.model_ready(request).await?.into_inner().ready;
    println!(
        "{command}: {model} is {}",
        if ready { "ready" } else { "not ready" }
    );
    Ok(())
}

/// As unary, with all tensors in a region of system shared memory: two inputs, then the output.
async fn shared_memory(conch: &mut Client) -> Outcome {
    let name = format!("client-rust-{}", std::process::id());
    let path = format!("/dev/shm/{name}");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    let outcome = async {
        file.set_len(3 * BYTES as u64)?;
        // Safety: the server writes to this memory only while it answers a request, during which this program
        // reads none of it.
        let mut memory = unsafe { memmap2::MmapMut::map_mut(&file)? };
        infer_in_place(conch, &name, &mut memory).await
    }
    .await;
    std::fs::remove_file(&path)?;
    outcome
}

async fn infer_in_place(conch: &mut Client, name: &str, memory: &mut [u8]) -> Outcome {
    let mut request = ModelInferRequest {
        model_name: "simple".into(),
        inputs: inputs(),
        ..Default::default()
    };
    for (place, vector) in vectors().iter().enumerate() {
        memory[place * BYTES..][..BYTES].copy_from_slice(vector);
        request.inputs[place].parameters = region(name, place * BYTES);
    }
    let parameters = region(name, 2 * BYTES);
    request.outputs.push(InferRequestedOutputTensor {
        name: "OUTPUT0".into(),
        parameters,
    });
    let registration = inference::SystemSharedMemoryRegisterRequest {
        name: name.into(),
        key: format!("/{name}"),
        byte_size: memory.len() as u64,
        ..Default::default()
    };
    conch.system_shared_memory_register(registration).await?;
    let response = conch.model_infer(request).await;
    conch
        .system_shared_memory_unregister(inference::SystemSharedMemoryUnregisterRequest {
            name: name.into(),
        })
        .await?;
    response?;
    println!("shared-memory: {}", numbers(&memory[2 * BYTES..]));
    Ok(())
}

fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

fn inputs() -> Vec<InferInputTensor> {
    ["INPUT0", "INPUT1"]
        .map(|name| input(name, "INT32", &[1, COUNT as i64]))
        .to_vec()
}

/// 0 to 15, and ones.
fn vectors() -> Vec<Vec<u8>> {
    let counted: Vec<i32> = (0..COUNT as i32).collect();
    vec![raw(&counted), raw(&[1; COUNT])]
}

fn region(name: &str, offset: usize) -> HashMap<String, InferParameter> {
    let parameter = |choice| InferParameter {
        parameter_choice: Some(choice),
    };
    HashMap::from([
        (
            "shared_memory_region".into(),
            parameter(ParameterChoice::StringParam(name.into())),
        ),
        (
            "shared_memory_offset".into(),
            parameter(ParameterChoice::Int64Param(offset as i64)),
        ),
        (
            "shared_memory_byte_size".into(),
            parameter(ParameterChoice::Int64Param(BYTES as i64)),
        ),
    ])
}

/// Numbers as the protocol has them: little-endian.
fn raw(values: &[i32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn numbers(raw: &[u8]) -> String {
    let values = raw
        .chunks_exact(4)
        .map(|four| i32::from_le_bytes([four[0], four[1], four[2], four[3]]));
    values
        .map(|value| value.to_string())
        .collect::<Vec<_>>()
        .join(" ")
}

async fn connect(address: &str, root_cert: Option<&str>) -> Result<Client, Box<dyn Error>> {
    let scheme = if root_cert.is_some() { "https" } else { "http" };
    let mut endpoint =
        Endpoint::from_shared(format!("{scheme}://{address}"))?.timeout(Duration::from_secs(30));
    if let Some(file) = root_cert {
        let roots = Certificate::from_pem(std::fs::read(file)?);
        endpoint = endpoint.tls_config(ClientTlsConfig::new().ca_certificate(roots))?;
    }
    Ok(GrpcInferenceServiceClient::new(endpoint.connect().await?))
}

async fn run(address: &str, root_cert: Option<&str>, command: &[&str]) -> Outcome {
    let conch = &mut connect(address, root_cert).await?;
    match command {
        ["unary"] => unary(conch).await,
        ["stream"] => stream(conch).await,
        ["load", model] => load(conch, model).await,
        ["unload", model] => unload(conch, model).await,
        _ => shared_memory(conch).await,
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut rest: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (mut address, mut root_cert) = ("localhost:8001", None);
    while let [option @ ("--address" | "--root-cert"), value, ..] = rest[..] {
        match option {
            "--address" => address = value,
            _ => root_cert = Some(value),
        }
        rest.drain(..2);
    }
    if !matches!(
        rest[..],
        ["unary" | "stream" | "shared-memory"] | ["load" | "unload", _]
    ) {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    }
    let Err(error) = run(address, root_cert, &rest).await else {
        return ExitCode::SUCCESS;
    };
    match error.downcast_ref::<Status>() {
        Some(status) => eprintln!("error: {}", status.message()),
        None => eprintln!("error: {error}"),
    }
    ExitCode::FAILURE
}
