import com.google.protobuf.ByteString;
import conch.inference.GRPCInferenceServiceGrpc;
import conch.inference.InferParameter;
import conch.inference.ModelInferRequest;
import conch.inference.ModelInferRequest.InferInputTensor;
import conch.inference.ModelInferRequest.InferRequestedOutputTensor;
import conch.inference.ModelInferResponse;
import conch.inference.ModelReadyRequest;
import conch.inference.ModelStreamInferResponse;
import conch.inference.RepositoryModelLoadRequest;
import conch.inference.RepositoryModelUnloadRequest;
import conch.inference.SystemSharedMemoryRegisterRequest;
import conch.inference.SystemSharedMemoryUnregisterRequest;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.StreamObserver;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Deque;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;

/** A client of conch in Java: unary and streamed inference, model control, TLS and shared memory. */
public final class Client {
  private static final String USAGE =
      "usage: client [--address HOST:PORT] [--root-cert FILE] "
          + "unary | stream | load MODEL | unload MODEL | shared-memory";
  private static final int COUNT = 16; // elements of each tensor of the model `simple`
  private static final int BYTES = Integer.BYTES * COUNT;

  private final ManagedChannel channel;

  private Client(ManagedChannel channel) {
    this.channel = channel;
  }

  private GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub conch() {
    return GRPCInferenceServiceGrpc.newBlockingStub(channel).withDeadlineAfter(30, TimeUnit.SECONDS);
  }

  /** Sends one request and prints the sum of its two vectors. */
  private void unary() {
    ModelInferRequest.Builder request = ModelInferRequest.newBuilder().setModelName("simple");
    request.addInputs(input("INPUT0", "INT32", 1, COUNT)).addInputs(input("INPUT1", "INT32", 1, COUNT));
    request.addRawInputContents(raw(counted())).addRawInputContents(raw(ones()));
    ModelInferResponse response = conch().modelInfer(request.build());
    for (int place = 0; place < response.getOutputsCount(); place++) {
      if (response.getOutputs(place).getName().equals("OUTPUT0")) {
        ByteString sums = response.getRawOutputContents(place);
        System.out.println("unary: " + numbers(sums.asReadOnlyByteBuffer()));
      }
    }
  }

  /** Has a decoupled model write text, and prints each word as it comes. */
  private void stream() throws Exception {
    ByteString prompt = ByteString.copyFromUtf8("A");
    ModelInferRequest request =
        ModelInferRequest.newBuilder()
            .setModelName("word_chain")
            .addInputs(input("prompt", "BYTES", 1))
            .addInputs(input("max_words", "INT32", 1))
            .addRawInputContents(raw(prompt.size()).concat(prompt))
            .addRawInputContents(raw(5))
            .build();
    CompletableFuture<Void> end = new CompletableFuture<>();
    StreamObserver<ModelStreamInferResponse> printer =
        new StreamObserver<>() {
          @Override
          public void onNext(ModelStreamInferResponse message) {
            if (message.getErrorMessage().isEmpty()) {
              ByteString word = message.getInferResponse().getRawOutputContents(0).substring(4);
              System.out.println("stream: " + word.toStringUtf8());
            } else {
              end.completeExceptionally(new IOException(message.getErrorMessage()));
            }
          }

          @Override
          public void onError(Throwable error) {
            end.completeExceptionally(error);
          }

          @Override
          public void onCompleted() {
            end.complete(null);
          }
        };
    StreamObserver<ModelInferRequest> requests =
        GRPCInferenceServiceGrpc.newStub(channel)
            .withDeadlineAfter(30, TimeUnit.SECONDS)
            .modelStreamInfer(printer);
    requests.onNext(request);
    requests.onCompleted(); // The server ends the stream after the last response.
    try {
      end.get();
    } catch (ExecutionException error) {
      throw (Exception) error.getCause();
    }
  }

  /** Loads a model, or loads it again. */
  private void load(String model) {
    conch().repositoryModelLoad(RepositoryModelLoadRequest.newBuilder().setModelName(model).build());
    printReady("load", model);
  }

  /** Unloads a model. */
  private void unload(String model) {
    conch().repositoryModelUnload(RepositoryModelUnloadRequest.newBuilder().setModelName(model).build());
    printReady("unload", model);
  }

  private void printReady(String command, String model) {
    boolean ready = conch().modelReady(ModelReadyRequest.newBuilder().setName(model).build()).getReady();
    System.out.printf("%s: %s is %s%n", command, model, ready ? "ready" : "not ready");
  }

  /** As unary, with all tensors in a region of system shared memory: two inputs, then the output. */
  private void sharedMemory() throws IOException {
    String name = "client-java-" + ProcessHandle.current().pid();
    Path path = Path.of("/dev/shm", name);
    ByteBuffer memory;
    try (FileChannel file =
        FileChannel.open(
            path, StandardOpenOption.CREATE_NEW, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
      memory = file.map(FileChannel.MapMode.READ_WRITE, 0, 3 * BYTES).order(ByteOrder.LITTLE_ENDIAN);
    }
    try {
      memory.asIntBuffer().put(counted()).put(ones());
      conch()
          .systemSharedMemoryRegister(
              SystemSharedMemoryRegisterRequest.newBuilder()
                  .setName(name)
                  .setKey("/" + name)
                  .setByteSize(3 * BYTES)
                  .build());
      try {
        ModelInferRequest.Builder request = ModelInferRequest.newBuilder().setModelName("simple");
        request.addInputs(input("INPUT0", "INT32", 1, COUNT).putAllParameters(region(name, 0)));
        request.addInputs(input("INPUT1", "INT32", 1, COUNT).putAllParameters(region(name, BYTES)));
        request.addOutputs(
            InferRequestedOutputTensor.newBuilder()
                .setName("OUTPUT0")
                .putAllParameters(region(name, 2 * BYTES)));
        conch().modelInfer(request.build());
        System.out.println("shared-memory: " + numbers(memory.position(2 * BYTES)));
      } finally {
        conch()
            .systemSharedMemoryUnregister(
                SystemSharedMemoryUnregisterRequest.newBuilder().setName(name).build());
      }
    } finally {
      Files.delete(path);
    }
  }

  private static InferInputTensor.Builder input(String name, String datatype, long... shape) {
    InferInputTensor.Builder input = InferInputTensor.newBuilder().setName(name).setDatatype(datatype);
    Arrays.stream(shape).forEach(input::addShape);
    return input;
  }

  private static Map<String, InferParameter> region(String name, long offset) {
    return Map.of(
        "shared_memory_region", InferParameter.newBuilder().setStringParam(name).build(),
        "shared_memory_offset", InferParameter.newBuilder().setInt64Param(offset).build(),
        "shared_memory_byte_size", InferParameter.newBuilder().setInt64Param(BYTES).build());
  }

  private static int[] counted() {
    int[] values = new int[COUNT];
    Arrays.setAll(values, place -> place);
    return values;
  }

  private static int[] ones() {
    int[] values = new int[COUNT];
    Arrays.fill(values, 1);
    return values;
  }

  /** Numbers as the protocol has them: little-endian. */
  private static ByteString raw(int... values) {
    ByteBuffer buffer = ByteBuffer.allocate(Integer.BYTES * values.length).order(ByteOrder.LITTLE_ENDIAN);
    buffer.asIntBuffer().put(values);
    return ByteString.copyFrom(buffer);
  }

  private static String numbers(ByteBuffer raw) {
    StringJoiner text = new StringJoiner(" ");
    ByteBuffer values = raw.order(ByteOrder.LITTLE_ENDIAN);
    while (values.hasRemaining()) {
      text.add(Integer.toString(values.getInt()));
    }
    return text.toString();
  }

  private void run(Deque<String> arguments) throws Exception {
    switch (arguments.pop()) {
      case "unary" -> unary();
      case "stream" -> stream();
      case "load" -> load(arguments.pop());
      case "unload" -> unload(arguments.pop());
      default -> sharedMemory();
    }
  }

  private static boolean isCommand(Deque<String> arguments) {
    return switch (arguments.isEmpty() ? "" : arguments.peek()) {
      case "unary", "stream", "shared-memory" -> arguments.size() == 1;
      case "load", "unload" -> arguments.size() == 2;
      default -> false;
    };
  }

  public static void main(String[] given) throws InterruptedException {
    Deque<String> arguments = new ArrayDeque<>(List.of(given));
    String address = "localhost:8001";
    String rootCert = null;
    while (arguments.size() > 1 && List.of("--address", "--root-cert").contains(arguments.peek())) {
      if (arguments.pop().equals("--address")) {
        address = arguments.pop();
      } else {
        rootCert = arguments.pop();
      }
    }
    if (!isCommand(arguments)) {
      System.err.println(USAGE);
      System.exit(2);
    }
    System.exit(call(address, rootCert, arguments));
  }

  private static int call(String address, String rootCert, Deque<String> arguments)
      throws InterruptedException {
    ManagedChannel channel = null;
    try {
      ChannelCredentials credentials =
          rootCert == null
              ? InsecureChannelCredentials.create()
              : TlsChannelCredentials.newBuilder().trustManager(new File(rootCert)).build();
      channel = Grpc.newChannelBuilder(address, credentials).build();
      new Client(channel).run(arguments);
      return 0;
    } catch (StatusRuntimeException error) {
      System.err.println("error: " + Status.fromThrowable(error).getDescription());
    } catch (Exception error) {
      System.err.println("error: " + error.getMessage());
    } finally {
      if (channel != null) {
        channel.shutdown().awaitTermination(5, TimeUnit.SECONDS);
      }
    }
    return 1;
  }
}
