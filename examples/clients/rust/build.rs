//! Generates the client from the protos; needs protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let protos = "../../../proto";
    println!("cargo:rerun-if-changed={protos}/inference");
    tonic_build::configure()
        .build_server(false)
        .compile_protos(
            &[format!("{protos}/inference/grpc_service.proto")],
            &[protos.to_string()],
        )?;
    Ok(())
}
