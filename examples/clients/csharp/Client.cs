// A client of conch in C#: unary and streamed inference, model control, TLS and shared memory.
using System.IO.MemoryMappedFiles;
using System.Runtime.InteropServices;
using System.Security.Cryptography.X509Certificates;
using System.Text;
using Conch.Inference;
using Google.Protobuf;
using Google.Protobuf.Collections;
using Grpc.Core;
using Grpc.Net.Client;
using InputTensor = Conch.Inference.ModelInferRequest.Types.InferInputTensor;
using OutputTensor = Conch.Inference.ModelInferRequest.Types.InferRequestedOutputTensor;
using Service = Conch.Inference.GRPCInferenceService.GRPCInferenceServiceClient;

internal static class Client
{
    private const string Usage =
        "usage: client [--address HOST:PORT] [--root-cert FILE] "
        + "unary | stream | load MODEL | unload MODEL | shared-memory";
    private const int Count = 16; // elements of each tensor of the model `simple`
    private const int Bytes = sizeof(int) * Count;

    /// <summary>Sends one request and prints the sum of its two vectors.</summary>
    private static async Task Unary(Service conch)
    {
        var request = new ModelInferRequest { ModelName = "simple", Inputs = { Inputs() } };
        request.RawInputContents.AddRange(Vectors().Select(vector => Raw(vector)));
        var response = await conch.ModelInferAsync(request, deadline: Deadline());
        for (var place = 0; place < response.Outputs.Count; place++)
        {
            if (response.Outputs[place].Name == "OUTPUT0")
            {
                Console.WriteLine($"unary: {Numbers(response.RawOutputContents[place].Span)}");
            }
        }
    }

    /// <summary>Has a decoupled model write text, and prints each word as it comes.</summary>
    private static async Task Stream(Service conch)
    {
        var prompt = Encoding.UTF8.GetBytes("A");
        var request = new ModelInferRequest
        {
            ModelName = "word_chain",
            Inputs = { Input("prompt", "BYTES", 1), Input("max_words", "INT32", 1) },
            RawInputContents = { ByteString.CopyFrom(Raw(prompt.Length).Concat(prompt).ToArray()), Raw(5) },
        };
        using var exchange = conch.ModelStreamInfer(deadline: Deadline());
        await exchange.RequestStream.WriteAsync(request);
        await exchange.RequestStream.CompleteAsync(); // The server ends the stream after the last response.
        await foreach (var message in exchange.ResponseStream.ReadAllAsync())
        {
            if (message.ErrorMessage.Length > 0)
            {
                throw new InvalidOperationException(message.ErrorMessage);
            }
            var word = Encoding.UTF8.GetString(message.InferResponse.RawOutputContents[0].Span[4..]);
            Console.WriteLine($"stream: {word}");
        }
    }

    /// <summary>Loads a model, or loads it again.</summary>
    private static async Task Load(Service conch, string model)
    {
        var request = new RepositoryModelLoadRequest { ModelName = model };
        await conch.RepositoryModelLoadAsync(request, deadline: Deadline());
        await PrintReady(conch, "load", model);
    }

    /// <summary>Unloads a model.</summary>
    private static async Task Unload(Service conch, string model)
    {
        var request = new RepositoryModelUnloadRequest { ModelName = model };
        await conch.RepositoryModelUnloadAsync(request, deadline: Deadline());
        await PrintReady(conch, "unload", model);
    }

    private static async Task PrintReady(Service conch, string command, string model)
    {
        var request = new ModelReadyRequest { Name = model };
        var response = await conch.ModelReadyAsync(request, deadline: Deadline());
        Console.WriteLine($"{command}: {model} is {(response.Ready ? "ready" : "not ready")}");
    }

    /// <summary>
    /// As unary, with all tensors in a region of system shared memory: two inputs, then the output.
    /// </summary>
    private static async Task SharedMemory(Service conch)
    {
        var name = $"client-csharp-{Environment.ProcessId}";
        var path = $"/dev/shm/{name}";
        using var memory = MemoryMappedFile.CreateFromFile(path, FileMode.CreateNew, null, 3 * Bytes);
        try
        {
            using var view = memory.CreateViewAccessor();
            var registration = new SystemSharedMemoryRegisterRequest
            {
                Name = name,
                Key = "/" + name,
                ByteSize = 3 * Bytes,
            };
            await conch.SystemSharedMemoryRegisterAsync(registration, deadline: Deadline());
            try
            {
                await InferInPlace(conch, name, view);
            }
            finally
            {
                var registered = new SystemSharedMemoryUnregisterRequest { Name = name };
                await conch.SystemSharedMemoryUnregisterAsync(registered, deadline: Deadline());
            }
        }
        finally
        {
            File.Delete(path);
        }
    }

    private static async Task InferInPlace(Service conch, string name, MemoryMappedViewAccessor view)
    {
        var request = new ModelInferRequest { ModelName = "simple", Inputs = { Inputs() } };
        var vectors = Vectors();
        for (var place = 0; place < vectors.Length; place++)
        {
            view.WriteArray(place * Bytes, vectors[place], 0, Count);
            SetRegion(request.Inputs[place].Parameters, name, place * Bytes);
        }
        var output = new OutputTensor { Name = "OUTPUT0" };
        SetRegion(output.Parameters, name, 2 * Bytes);
        request.Outputs.Add(output);
        await conch.ModelInferAsync(request, deadline: Deadline());
        var sums = new int[Count];
        view.ReadArray(2 * Bytes, sums, 0, Count);
        Console.WriteLine($"shared-memory: {string.Join(' ', sums)}");
    }

    private static InputTensor Input(string name, string datatype, params long[] shape)
    {
        return new InputTensor { Name = name, Datatype = datatype, Shape = { shape } };
    }

    private static InputTensor[] Inputs()
    {
        return [Input("INPUT0", "INT32", 1, Count), Input("INPUT1", "INT32", 1, Count)];
    }

    /// <summary>0 to 15, and ones.</summary>
    private static int[][] Vectors()
    {
        return [Enumerable.Range(0, Count).ToArray(), Enumerable.Repeat(1, Count).ToArray()];
    }

    private static void SetRegion(MapField<string, InferParameter> parameters, string name, long offset)
    {
        parameters["shared_memory_region"] = new InferParameter { StringParam = name };
        parameters["shared_memory_offset"] = new InferParameter { Int64Param = offset };
        parameters["shared_memory_byte_size"] = new InferParameter { Int64Param = Bytes };
    }

    /// <summary>Numbers as the protocol has them, on little-endian machines.</summary>
    private static ByteString Raw(params int[] values)
    {
        return ByteString.CopyFrom(MemoryMarshal.AsBytes(values.AsSpan()));
    }

    private static string Numbers(ReadOnlySpan<byte> raw)
    {
        return string.Join(' ', MemoryMarshal.Cast<byte, int>(raw).ToArray());
    }

    private static DateTime Deadline()
    {
        return DateTime.UtcNow.AddSeconds(30);
    }

    private static GrpcChannel Connect(string address, string? rootCert)
    {
        if (rootCert is null)
        {
            return GrpcChannel.ForAddress($"http://{address}");
        }
        var policy = new X509ChainPolicy
        {
            TrustMode = X509ChainTrustMode.CustomRootTrust,
            RevocationMode = X509RevocationMode.NoCheck,
        };
        policy.CustomTrustStore.ImportFromPemFile(rootCert);
        var handler = new SocketsHttpHandler { SslOptions = { CertificateChainPolicy = policy } };
        return GrpcChannel.ForAddress($"https://{address}", new GrpcChannelOptions { HttpHandler = handler });
    }

    private static Func<Service, Task>? Command(string[] arguments)
    {
        return arguments switch
        {
            ["unary"] => Unary,
            ["stream"] => Stream,
            ["load", var model] => conch => Load(conch, model),
            ["unload", var model] => conch => Unload(conch, model),
            ["shared-memory"] => SharedMemory,
            _ => null,
        };
    }

    private static async Task<int> Main(string[] arguments)
    {
        var address = "localhost:8001";
        string? rootCert = null;
        while (arguments is ["--address" or "--root-cert", var value, ..])
        {
            if (arguments[0] == "--address")
            {
                address = value;
            }
            else
            {
                rootCert = value;
            }
            arguments = arguments[2..];
        }
        if (Command(arguments) is not { } command)
        {
            Console.Error.WriteLine(Usage);
            return 2;
        }
        try
        {
            using var channel = Connect(address, rootCert);
            await command(new Service(channel));
            return 0;
        }
        catch (RpcException error)
        {
            Console.Error.WriteLine($"error: {error.Status.Detail}");
        }
        catch (Exception error)
        {
            Console.Error.WriteLine($"error: {error.Message}");
        }
        return 1;
    }
}
